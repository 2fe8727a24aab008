"""What is done with a model while an artifact is applied: copied, moved, saved, loaded twice, put
into a pipeline."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)

from runtime import Headwise
from runtime.attention.state import layer_of
from tests.runtime.omnikv import CLOSE

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
SPECIAL = ("<pad>", "<s>", "</s>")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: "t17" is 17; those that end a text are never said."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {name: i for i, name in enumerate((*SPECIAL, *(f"t{i}" for i in range(3, 97))))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="t3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )


def words(tokens: torch.Tensor) -> str:
    return " ".join(f"t{token}" for token in tokens.flatten().tolist())


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_dense_until_given_an_artifact(copied, build, artifact_for, ids) -> None:
    model, prompt = build(), ids(200)
    dense = model(prompt).logits
    artifact = artifact_for(model)
    with Headwise(artifact).apply(model, backend="reference", strict=True) as handle:
        sparse = model(prompt).logits
        twin = copied(model)
        assert all(layer_of(module) is None for module in twin.modules())
        assert twin.config._attn_implementation == "sdpa"
        assert torch.equal(twin(prompt).logits, dense)
        with Headwise(artifact).apply(twin, backend="reference", strict=True) as other:
            assert torch.equal(twin(prompt).logits, sparse)
            assert other.stats() == {"sparse": 2, "dense": {}}
        assert torch.equal(twin(prompt).logits, dense)
        assert torch.equal(model(prompt).logits, sparse)
        assert handle.stats()["sparse"] == 4


def test_a_model_stored_while_applied_remembers_no_artifact(
    build, apply, ids, tmp_path: Path
) -> None:
    """By save_pretrained, and by torch.save, which loads where Headwise is not."""
    model, prompt = build(), ids(200)
    dense = model(prompt).logits
    with apply(model):
        model.save_pretrained(tmp_path)
        torch.save(model, tmp_path / "model.pt")
        assert "headwise" not in (tmp_path / "config.json").read_text()
        assert "headwise" not in json.dumps(model.config.to_dict()) + model.config.to_json_string()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(prompt).logits, dense)
    code = (
        "import sys, torch; torch.set_num_threads(1); model = torch.load(sys.argv[1], "
        "weights_only=False)\n"
        "with torch.no_grad(): torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])\n"
        "print(model.config._attn_implementation, 'runtime.attention' in sys.modules)"
    )
    torch.save(prompt, tmp_path / "prompt.pt")
    paths = [str(tmp_path / name) for name in ("model.pt", "prompt.pt", "logits.pt")]
    command = [sys.executable, "-c", code, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sdpa", "False"]
    assert torch.equal(torch.load(paths[2]), dense)


def test_moved_to_another_type_and_device(build, apply, masked, ids) -> None:
    model, prompt = build(), ids(200)
    with apply(model, strict=True) as handle:
        single = model(prompt).logits
        model.double()
        with masked(model):
            expected = model(prompt).logits
        found = model(prompt).logits
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), expected.float(), **CLOSE)
        assert torch.equal(model.float()(prompt).logits, single)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.to("meta").to_empty(device="cpu").load_state_dict(state)
        model.model.rotary_emb = copy.deepcopy(build().model.rotary_emb)
        assert torch.equal(model(prompt).logits, single)
        assert model.bfloat16()(prompt).logits.dtype == torch.bfloat16
        assert handle.stats() == {"sparse": 10, "dense": {}}


def test_accelerate_hooks_pass_the_mask_on(build, apply, ids) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, tokens = build(), ids(200, batch=2)
    real = torch.ones_like(tokens)
    real[0, :50] = 0
    with apply(model, strict=True) as handle:
        expected = model(tokens, attention_mask=real).logits
        for layer in model.model.layers:
            hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu", io_same_device=True))
        assert torch.equal(model(tokens, attention_mask=real).logits, expected)
        assert handle.stats() == {"sparse": 4, "dense": {}}


def test_a_pipeline_over_a_batch_of_unlike_prompts(build, apply, masked, ids, tokenizer) -> None:
    model, prompts = build(), [ids(n, seed=n) for n in (200, 150, 60)]
    with masked(model):
        tokens = [model.generate(prompt, **OPTIONS)[0, prompt.shape[1] :] for prompt in prompts]
        expected = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
    with apply(model, strict=True) as handle:
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
        texts = [words(prompt) for prompt in prompts]
        found = generator(texts, batch_size=3, return_full_text=False, **OPTIONS)
        assert handle.stats()["sparse"] == 2
    assert [row[0]["generated_text"].strip() for row in found] == expected


def test_text_is_streamed_from_a_thread(build, apply, masked, ids, tokenizer) -> None:
    model, prompt = build(), ids(200)
    with masked(model):
        expected = tokenizer.decode(model.generate(prompt, **OPTIONS)[0, 200:])
    with apply(model, strict=True) as handle:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        cache = handle.new_cache()
        given = {"input_ids": prompt, "streamer": streamer, "past_key_values": cache, **OPTIONS}
        thread = threading.Thread(target=model.generate, kwargs=given)
        thread.start()
        parts = list(streamer)
        thread.join()
    assert "".join(parts) == expected and len(parts) > 3
