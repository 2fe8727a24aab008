"""Apply and undo: apply checks the model first, and undo restores it in every case."""

import copy
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

import artifacts
import headwise
from artifacts import HeadwiseError
from runtime import LoadedArtifact, apply_dense, load
from runtime.fingerprint import check, fingerprint
from tests.runtime.batches import real_from
from tests.runtime.tiny import pictured_model


def implementations(model):
    configs = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    return [config._attn_implementation for config in configs]


def ends_by_error(model, apply):
    with pytest.raises(RuntimeError, match="inside"), apply(model):
        raise RuntimeError("inside")


def ends_by_handle(model, apply):
    handle = apply(model)
    handle.undo()
    handle.undo()


def ends_by_model(model, apply):
    headwise.undo(model)
    for _ in range(2):
        apply(model)
        headwise.undo(model)
        headwise.undo(model)


def ends_by_language_part(model, apply):
    apply(model)
    headwise.undo(getattr(model.model, "language_model", model.model))


def ends_after_another_implementation(model, apply):
    with apply(model):
        model.set_attn_implementation("sdpa")
    apply(model)
    model.set_attn_implementation("sdpa")
    why = r"set_attn_implementation\('sdpa'\) has ended: headwise\.undo\(model\) removes"
    with pytest.raises(HeadwiseError, match=why):
        apply(model)
    headwise.undo(model)


def fails_to_begin(model, apply):
    def fails(*_):
        raise RuntimeError("no name")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr("runtime.apply._Name", fails)
        with pytest.raises(RuntimeError, match="no name"):
            apply(model)


ENDS = [
    ends_by_error,
    ends_by_handle,
    ends_by_model,
    ends_by_language_part,
    ends_after_another_implementation,
    fails_to_begin,
]


@pytest.mark.parametrize(
    ("before", "dense"),
    [("eager", False), ("eager", True), ("flex_attention", True), ("nested", False)],
)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_model_is_as_before_apply(end, before, dense, build, apply, ids):
    model, prompt = pictured_model("Gemma3") if before == "nested" else build(), ids(200)
    expected = model(prompt).logits
    if before == "nested":
        model.config.vision_config._attn_implementation = "eager"
    else:
        model.set_attn_implementation(before)
    former = implementations(model)
    attributes = [dict(vars(module)) for module in model.modules()]

    def applied(model):
        handle = apply_dense(model) if dense else apply(model)
        # Of a nested configuration only the text's part changes.
        text = model.config.get_text_config()
        assert text._attn_implementation == "headwise"
        assert implementations(model).count("headwise") == 1
        return handle

    end(model, applied)
    assert implementations(model) == former
    assert [dict(vars(module)) for module in model.modules()] == attributes
    if before != "nested":
        model.set_attn_implementation("sdpa")
    assert torch.equal(model(prompt).logits, expected)
    with apply(model, strict=True) as handle:
        assert not torch.equal(model(prompt).logits, expected)
        assert handle.stats()["sparse"] == 2


def test_apply_flash_attention_model_uses_sdpa_and_restores_flash(build, artifact_for, ids):
    def attention(*_, **__):
        pytest.fail("flash was asked")

    AttentionInterface.register("flash_for_tests", attention)
    AttentionMaskInterface.register("flash_for_tests", flash_attention_mask)
    model, prompt = build(), ids(100, batch=2)
    real = real_from(100, 30, 0)
    expected = model(prompt, attention_mask=real).logits
    model.config._attn_implementation = "flash_for_tests"
    with LoadedArtifact(artifact_for(model)).apply(model) as handle:
        assert torch.equal(model(prompt, attention_mask=real).logits, expected)
        assert handle.stats()["dense"] == {"short": 2}
    assert implementations(model) == ["flash_for_tests"]


@pytest.fixture
def one_process():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_apply_rejects_sharded_model_and_names_vllm(build, artifact_for, one_process):
    headwise, model = LoadedArtifact(artifact_for(build())), build()
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(
        torch.distributed.tensor.distribute_tensor(projection.weight.detach(), one_process)
    )
    for refused in (headwise.apply, headwise.new_cache, apply_dense):
        why = "LlamaForCausalLM is sharded over processes: vLLM is the way"
        with pytest.raises(HeadwiseError, match=why) as error:
            refused(model)
        assert "\n" not in str(error.value)
    assert implementations(model) == ["sdpa"]


def test_apply_twice_raises_and_keeps_first(build, apply, ids):
    model = build()
    twin = type(model)(model.config)
    with apply(model) as outer:
        for second in (apply, apply_dense):
            with pytest.raises(HeadwiseError, match="already has an artifact"):
                second(model)
            with pytest.raises(HeadwiseError, match="shares its configuration"):
                second(twin)
        model(ids(200))
        assert outer.stats()["sparse"] == 2
    assert implementations(model) == ["sdpa"]


def test_handle_undo_after_model_undo_keeps_later_apply(build, apply, ids):
    model = build()
    with apply(model) as first:
        headwise.undo(model)
        assert repr(first) == "<Handle: undone>"
        with pytest.raises(HeadwiseError, match="no longer applied"):
            first.new_cache()
        second = apply(model, strict=True)
    first.undo()
    model(ids(200))
    assert second.stats()["sparse"] == 2
    second.undo()
    assert implementations(model) == ["sdpa"]


def test_undo_of_copy_or_other_model_keeps_first_applied(build, apply, ids):
    model = build()
    with apply(model, strict=True) as handle:
        headwise.undo(copy.deepcopy(model))
        headwise.undo(build(seed=1))
        headwise.undo(type(model)(model.config))
        model(ids(200))
        assert handle.stats()["sparse"] == 2
    with pytest.raises(HeadwiseError, match="undo takes the model, got str"):
        headwise.undo("model")


def test_apply_keeps_no_reference_to_model(build, apply):
    model = build()
    apply(model)
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_apply_from_eight_threads_returns_one_handle(build, artifact_for):
    model = build(num_hidden_layers=8)
    artifact = LoadedArtifact(artifact_for(model))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(10):
            start = threading.Barrier(8)

            def apply(number, attempt=attempt, start=start):
                start.wait()
                try:
                    if attempt % 2:
                        return apply_dense(model)
                    return artifact.apply(model, backend="reference")
                except HeadwiseError as error:
                    return error

            with ThreadPoolExecutor(8) as pool:
                results = list(pool.map(apply, range(8)))
            refused = [each for each in results if isinstance(each, HeadwiseError)]
            assert len(refused) == 7
            assert all("apply_dense applied: headwise.undo(model)" in str(each) for each in refused)
            assert model.config._attn_implementation == "headwise"
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(headwise.undo, [model] * 8))
            assert implementations(model) == ["sdpa"]
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("Mistral", {"head_dim": 64, "sliding_window": None}, "architecture"),
        ("Llama", {"num_hidden_layers": 3}, "num_layers"),
        ("Llama", {"num_key_value_heads": 4}, "num_kv_heads"),
        ("Llama", {"head_dim": 32}, "head_dim"),
        ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope"),
        ("Llama", {"intermediate_size": 64}, "intermediate_size"),
        ("Llama", {"seed": 1}, "weights_sha256"),
    ],
)
def test_apply_rejects_other_model_by_first_differing_field(
    family, changes, field, build, artifact_for, ids
):
    artifact, other = artifact_for(build()), build(family, **changes)
    with pytest.raises(HeadwiseError) as error:
        LoadedArtifact(artifact).apply(other)
    assert f"model: {field} is " in str(error.value) and "\n" not in str(error.value)
    assert implementations(other) == ["sdpa"]
    if field == "weights_sha256":
        with LoadedArtifact(artifact).apply(other, check_weights=False) as handle:
            other(ids(200))
            assert handle.stats() == {"sparse": 2, "dense": {}}


@pytest.mark.parametrize("check_weights", [True, False])
def test_apply_names_added_tokens_and_the_gate(check_weights, build, artifact_for):
    artifact, model = LoadedArtifact(artifact_for(build())), build(vocab_size=99)
    why = r"vocab_size is 97 in the artifact \(tiny\), 99 in this model; .*headwise gate --out"
    with pytest.raises(HeadwiseError, match=why) as error:
        artifact.apply(model, check_weights=check_weights)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "field", "values"),
    [
        ("Llama", {"hidden_act": "gelu"}, "hidden_act", ("silu", "gelu")),
        ("Llama", {"attention_bias": True}, "attention_bias", ("False", "True")),
        ("Gemma3", {"sliding_window": 16}, "sliding_window", ("32", "16")),
        ("Gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping", ("5.0", "None")),
        (
            "Gemma3",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types",
            (r"\['sliding.*\]", r"\['full.*\]"),
        ),
    ],
)
def test_check_names_field_of_configuration_that_differs(family, changes, field, values, build):
    expected = fingerprint(build(family), name="tiny")
    why = f"model: {field} is {values[0]} in the artifact .tiny., {values[1]} in this model"
    with pytest.raises(HeadwiseError, match=why):
        check(expected, build(family, **changes), weights=False)
    # An artifact that does not keep the fields: by the hash.
    bare = expected.model_copy(update={"config": None})
    with pytest.raises(HeadwiseError, match=r"model: config_sha256 is .*does not name the field"):
        check(bare, build(family, **changes), weights=False)


def test_apply_rejects_unknown_backend_and_non_model(build, artifact_for):
    headwise = LoadedArtifact(artifact_for(build()))
    with pytest.raises(HeadwiseError, match=r"one of auto, .*, got 'warp'"):
        headwise.apply(build(), backend="warp")
    with pytest.raises(HeadwiseError, match="Linear is not a transformers"):
        headwise.apply(torch.nn.Linear(1, 1))


def with_evidence(artifact, *, length=None, proven=True):
    """Return the artifact with a gate's evidence on prompts of this length."""
    verdict = artifacts.Verdict(proven=proven, why="14 right answers of 4 contexts")
    tasks = ()
    if length is not None:
        tasks = tuple(
            artifacts.TaskFigures(task="prose", length=tokens, prompts=2, kl=0.01)
            for tokens in (length, length // 2)
        )
    evidence = artifacts.Evidence(verdict=verdict, tasks=tasks)
    return artifact.model_copy(update={"evidence": evidence})


def test_load_unproven_artifact_warns_once(build, artifact_for, tmp_path, warnings):
    artifact = artifact_for(build())
    artifacts.save(with_evidence(artifact), tmp_path / "proven.yaml")
    artifacts.save(with_evidence(artifact, length=150, proven=False), tmp_path / "open.yaml")
    artifacts.save(artifact, tmp_path / "import.yaml")
    artifacts.save(artifact_for(build(), dense=True), tmp_path / "dense.yaml")
    load(tmp_path / "proven.yaml")
    load(tmp_path / "dense.yaml")
    assert warnings() == []
    for _ in range(2):
        load(tmp_path / "open.yaml")
        load(tmp_path / "import.yaml")
    few, none = warnings()
    assert "open.yaml is not proven up to 150 tokens: 14 right answers of 4 contexts; " in few
    assert none.endswith("import.yaml is not proven: no gate has run on its patterns")


@pytest.mark.parametrize(
    ("way", "proven"),
    [("whole", False), *((way, True) for way in ("whole", "chunks", "padded batch", "policy"))],
)
def test_prompt_longer_than_evidence_warns_once(way, proven, build, artifact_for, ids, warnings):
    model = build()
    artifact = with_evidence(artifact_for(model), length=160, proven=proven)
    if way == "policy":
        rows = ("all",) * model.config.num_hidden_layers
        section = artifacts.KVCache(policies={"all": artifacts.SnapKV()}, layers=rows)
        artifact = artifact.model_copy(update={"kv_cache": section})

    def run(handle, tokens):
        cache = handle.new_cache()
        if way == "chunks":
            model(tokens[:, :80], past_key_values=cache)
            model(tokens[:, 80:], past_key_values=cache)
        elif way == "padded batch":
            two = tokens.repeat(2, 1)
            mask = torch.ones_like(two)
            mask[0, :60] = 0
            model(two, attention_mask=mask, past_key_values=cache)
        else:
            model(tokens, past_key_values=cache)

    with LoadedArtifact(artifact).apply(model, backend="reference") as handle:
        # A decode step after the longest measured prompt is not part of the prompt.
        run(handle, ids(160))
        assert handle.stats()["sparse"] and warnings() == []
        run(handle, ids(200))
        run(handle, ids(240))
        (line,) = warnings()
    assert "a prompt of 200 tokens is longer than the 160 up to which" in line


def test_prompt_without_evidence_does_not_warn(build, artifact_for, ids, warnings):
    model = build()
    with LoadedArtifact(artifact_for(model)).apply(model, backend="reference") as handle:
        model(ids(400))
        assert handle.stats()["sparse"] and warnings() == []
