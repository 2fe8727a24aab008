"""PEFT's models: with an artifact, in the harness, and as the models that are measured."""

from __future__ import annotations

import pytest
import torch

import artifacts
import headwise
from artifacts import HeadwiseError
from profiling.models.identity import identity_of
from profiling.models.loading import load_model, load_tokenizer
from runtime import LoadedArtifact
from runtime.fingerprint import fingerprint
from runtime.layers import inner_model
from tests.tiny_text_model import save_tiny

peft = pytest.importorskip("peft", reason="peft is not installed here: .ci/lm-eval runs these")

LENGTH = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its artifact."""
    folder = tmp_path_factory.mktemp("peft")
    model = save_tiny(folder / "tiny")
    origin = artifacts.Imported(format="minference", file="f.json", sha256="0" * 64)
    patterns = {"a": artifacts.AShape(sink=64, window=64)}
    artifact = artifacts.Artifact(
        model=fingerprint(load_model(str(model), dtype="float32").model, name="tiny"),
        search=None,
        patterns=patterns,
        prefill=artifacts.Prefill(dense_below=128, layers=(("a",) * 6,) * 3, imported=origin),
    )
    artifacts.save(artifact, folder / "cfg.yaml")
    unknown = artifact.model.model_copy(update={"weights_sha256": None})
    artifacts.save(artifact.model_copy(update={"model": unknown}), folder / "adapted.yaml")
    return folder


def adapted(folder, seed=0):
    """The model with a random adapter."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False
    )
    model = load_model(str(folder / "tiny"), dtype="float32").model
    return peft.get_peft_model(model, config).eval()


def prompted(folder):
    """The model behind a learned prompt."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = load_model(str(folder / "tiny"), dtype="float32").model
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("make", [adapted, prompted])
def test_apply_serves_the_model_inside(make, folder):
    model, ids = make(folder), torch.arange(300)[None] % 250
    loaded = headwise.load(folder / "cfg.yaml")
    inner = inner_model(model)
    with torch.no_grad(), loaded.apply(model, check_weights=False) as handle:
        through = model(ids, past_key_values=loaded.new_cache(model)).logits[:, -1]
        assert handle.stats() == {"sparse": 3, "dense": {}}
        handle.new_cache()
    assert inner.config._attn_implementation == "sdpa"
    if make is adapted:
        with torch.no_grad(), loaded.apply(inner, check_weights=False):
            torch.testing.assert_close(through, inner(ids).logits[:, -1])
        with pytest.raises(HeadwiseError, match="an adapter around"):
            loaded.apply(model)
    headwise.undo(model)


def test_apply_knows_merged_adapters_for_other_weights(folder):
    merged = adapted(folder).merge_and_unload()
    with pytest.raises(HeadwiseError, match="for another model: weights_sha256"):
        LoadedArtifact(artifacts.load(folder / "cfg.yaml")).apply(merged)


def test_identity_of_adapters_differs(folder):
    first, second = adapted(folder), adapted(folder, seed=1)
    keys = [identity_of(inner_model(model), "tiny").key for model in (first, second)]
    with first.disable_adapter():
        keys.append(identity_of(inner_model(first), "tiny").key)
    keys.append(identity_of(first.merge_and_unload(), "tiny").key)
    keys.append(identity_of(load_model(str(folder / "tiny"), dtype="float32").model, "tiny").key)
    assert len(set(keys)) == 5
    again = identity_of(inner_model(adapted(folder)), "tiny")
    assert again.unknown is None and again.key == keys[0]


def test_evaluate_and_gate_measure_the_adapter_and_resume_no_other(folder, tmp_path):
    tokenizer = load_tokenizer(str(folder / "tiny"))

    def perplexity(model):
        record = headwise.evaluate(
            model,
            tokenizer,
            folder / "adapted.yaml",
            out=tmp_path,
            name="tiny",
            tasks=("prose",),
            length=(LENGTH,),
            samples=1,
            methods=("dense",),
            speed=False,
        )
        return next(e["value"] for e in record["figures"] if e["measure"] == "perplexity")

    first, second = perplexity(adapted(folder)), perplexity(adapted(folder, seed=1))
    assert first != second
    assert perplexity(adapted(folder)) == first
    result = headwise.gate(
        adapted(folder), tokenizer, folder / "adapted.yaml", length=LENGTH, tasks=("prose",)
    )
    assert result.tasks
    with pytest.raises(HeadwiseError, match="PeftModelForCausalLM puts learned prompts before"):
        perplexity(prompted(folder))


def test_harness_serves_an_adapter_with_an_artifact(folder, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from profiling.harness.model import HeadwiseLM

    # Of fewer words than the model has: models pad their embeddings.
    tokenizer = load_tokenizer(str(folder / "tiny"))
    tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<end>"})
    tokenizer.save_pretrained(folder / "tiny")
    adapted(folder).save_pretrained(tmp_path / "adapter")
    options = {"dtype": "float32", "device": "cpu", "config": str(folder / "cfg.yaml")}
    paths = {"pretrained": str(folder / "tiny"), "peft": str(tmp_path / "adapter")}
    lm = HeadwiseLM(**paths, **options, check_weights=False)
    lm.loglikelihood([Instance("loglikelihood", {}, ("to the sea " * 30, "x"), 0)])
    assert lm.get_model_info()["headwise_calls"] == {"sparse": 3, "dense": {}}
    with pytest.raises(HeadwiseError, match=r"an adapter around .*check_weights=False"):
        HeadwiseLM(**paths, **options)
