"""Each architecture: prefill and decode by patterns, on every cache; refusals by their cause."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import artifacts
from artifacts import HeadwiseError
from kernels import dispatch
from runtime import Headwise
from runtime.layers import attention_layers, sliding_layers
from tests.runtime.omnikv import DECODE, oracle, steps
from tests.runtime.tiny import FAMILIES, REFUSED, SINCE_5_24, SIZES, refused_model, tiny_model

CLOSE = {"atol": 3e-4, "rtol": 1e-3}
LATENT, SINKS = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite"), ("GptOss",)
WHOLE = [family for family in FAMILIES if family not in (*LATENT, *SINKS)]
FULL = [family for family in WHOLE if "layer_types" not in FAMILIES[family]]


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_prefill_and_decode_on_one_cache(family, build, apply, masked, ids):
    model, prompt, forced = build(family), ids(200, batch=2), ids(5, batch=2, seed=1)
    dense = model(prompt).logits
    with masked(model):
        whole = model(prompt).logits
        expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    assert (whole - dense).abs().max() > 1e-2
    with apply(model, strict=True) as handle:
        torch.testing.assert_close(model(prompt).logits, whole, **CLOSE)
        found = steps(model, prompt, forced, DynamicCache(config=model.config))
        assert handle.stats()["sparse"] > 0 and handle.stats()["dense"]["decode"] > 0
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_artifact_changes_nothing(family, build, apply, ids):
    model = build(family)
    prompt = ids(200, batch=2)
    expected = model(prompt).logits
    with apply(model, dense=True) as handle:
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)
        assert handle.stats()["sparse"] > 0


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GptOss"])
def test_a_dense_artifact_rounds_as_the_model_does(family, build, apply, ids):
    model = build(family).bfloat16()
    prompt = ids(200, batch=2)
    rounded = model(prompt).logits
    with apply(model, dense=True):
        found = model(prompt).logits
    exact = build(family)(prompt).logits
    assert (found - exact).norm() < 1.5 * (rounded - exact).norm() + 1e-3


@pytest.mark.parametrize("length", [129, 256])
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GptOss"])
def test_any_length_is_sdpa_with_the_index_as_mask(family, length, build, apply, masked, ids):
    model = build(family)
    prompt = ids(length, batch=2)
    with masked(model):
        expected = model(prompt).logits
    with apply(model, strict=True):
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)


def test_the_index_is_built_with_the_scale_of_the_model(build, apply, masked, ids):
    model, prompt = build("Gemma3", query_pre_attn_scalar=100_000), ids(600)
    with masked(model):
        expected = model(prompt).logits
    with apply(model, strict=True):
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)


def test_the_fastest_kernel_computes_what_the_reference_does(build, apply, ids):
    model, prompt = build(), ids(300, batch=2)
    probe = torch.randn(1, 4, 300, 64)
    reasons = dispatch.why_not(probe, probe, probe)
    if None not in [reason for name, reason in reasons.items() if name != "reference"]:
        pytest.skip(str(reasons))
    with apply(model, strict=True):
        expected = model(prompt).logits
    with apply(model, strict=True, backend="auto"):
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)


def test_short_prompts_are_bitwise_what_sdpa_gives(build, apply, ids):
    model, prompt = build(), ids(127)
    expected = model(prompt).logits
    with apply(model) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats() == {"sparse": 0, "dense": {"short": 2}}


def test_a_layer_that_slides_is_left_alone(build, apply, ids):
    model = build("Gemma3")
    with apply(model) as handle:
        model(ids(200))
        assert handle.stats() == {"sparse": 2, "dense": {"layer left alone": 1}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_with_a_short_sequence(family, build, apply, ids):
    """Sequences of one batch are served sparsely and densely side by side."""
    model, tokens = build(family), ids(260, batch=2)
    real = torch.ones_like(tokens)
    real[1, :150] = 0
    given = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    with apply(model, strict=True) as handle:
        together = model(tokens, **given).logits
        assert handle.stats()["sparse"] > 0
        long, short = model(tokens[:1]).logits[0], model(tokens[1:, 150:]).logits[0]
    torch.testing.assert_close(together[0], long, **CLOSE)
    if "longrope" not in str(FAMILIES[family].get("rope_parameters")):
        # Its angles are those of the longest sequence in a batch.
        torch.testing.assert_close(together[1, 150:], short, **CLOSE)


def kept(model: Any) -> artifacts.KVCache:
    modules = attention_layers(model)
    sliding = sliding_layers(modules)
    layers = range(model.config.num_hidden_layers)
    rows = tuple("full" if layer in modules and layer not in sliding else None for layer in layers)
    return artifacts.KVCache(policies={"full": artifacts.Full()}, layers=rows)


@pytest.mark.parametrize("family", WHOLE)
def test_a_cache_that_keeps_everything_is_transformers_own(family, build, artifact_for, ids):
    model, prompt, forced = build(family), ids(150, batch=2), ids(5, batch=2, seed=1)
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    artifact = artifact_for(model, dense=True).model_copy(update={"kv_cache": kept(model)})
    with Headwise(artifact).apply(model, strict=True, backend="reference") as handle:
        found = steps(model, prompt, forced, handle.new_cache())
        assert handle.stats()["kept"] == 6 * len(attention_layers(model))
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_that_chooses_every_token_is_dense(family, build, artifact_for, ids):
    model, prompt, forced = build(family), ids(150, batch=2), ids(5, batch=2, seed=1)
    first = min(set(attention_layers(model)) - sliding_layers(attention_layers(model)))
    section = artifacts.Decode(
        omnikv=artifacts.OmniKV(filter_layers=(first,), dense_layers=(), budget=200)
    )
    headwise = Headwise(artifact_for(model, dense=True).model_copy(update={"decode": section}))
    if family in SINKS:
        with pytest.raises(
            HeadwiseError,
            match="has attention sinks of its own: the decode section cannot serve it",
        ):
            headwise.apply(model)
        return
    expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    for offload in ("never", "packed"):
        with headwise.apply(model, strict=True, backend="reference") as handle:
            found = steps(model, prompt, forced, handle.new_cache(offload=offload))
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("family", FULL)
def test_decode_by_chosen_tokens_is_the_papers(family, build, artifact_for, ids):
    model, prompt, forced = build(family), ids(150, batch=2), ids(5, batch=2, seed=1)
    section = DECODE.model_copy(update={"filter_layers": (0,), "dense_layers": ()})
    headwise = Headwise(
        artifact_for(model, dense=True).model_copy(
            update={"decode": artifacts.Decode(omnikv=section)}
        )
    )
    with oracle(model, section):
        expected = steps(model, prompt, forced, DynamicCache(config=model.config))
    for offload in ("never", "packed"):
        with headwise.apply(model, strict=True, backend="reference") as handle:
            found = steps(model, prompt, forced, handle.new_cache(offload=offload))
            assert handle.stats()["decode"] == 10
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        *(
            (family, r"layer 0 \(\w+Attention\) caches what it makes keys and values of")
            for family in LATENT
        ),
        (
            "GptOss",
            r"layer 0 \(GptOssAttention\) has attention sinks of its own: the kv_cache section",
        ),
    ],
)
def test_caches_that_cannot_drop_tokens_are_refused_when_applying(
    family, says, build, artifact_for
):
    model = build(family)
    headwise = Headwise(artifact_for(model).model_copy(update={"kv_cache": kept(model)}))
    for ask in (headwise.apply, headwise.new_cache):
        with pytest.raises(HeadwiseError, match=says) as error:
            ask(model)
        assert "\n" not in str(error.value)
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_served_is_refused_by_the_cause(name, build, artifact_for):
    model = refused_model(name)
    with pytest.raises(HeadwiseError) as error:
        Headwise(artifact_for(build())).apply(model)
    assert str(error.value) == f"{name} {REFUSED[name]['cause']}"


@pytest.mark.parametrize("family", ["Mistral", "Mixtral"])
def test_a_model_that_slides_everywhere_is_served_as_before(family, build, apply, ids, warnings):
    model, prompt = build(family, sliding_window=40), ids(200)
    expected = model(prompt).logits
    with apply(model) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["sparse"] == 0
    assert len(warnings()) == 1 and "slides" in warnings()[0]


TEXT = {name: size for name, size in SIZES.items() if not name.endswith("token_id")} | {
    "head_dim": 64
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WITH_IMAGES = {
    "Gemma3": {
        "vision_config": VISION | {"image_size": 8, "patch_size": 4},
        "mm_tokens_per_image": 4,
    },
    "Llava": {
        "vision_config": VISION
        | {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
    },
    "Qwen2_5_VL": {
        "vision_config": {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 256}
    },
}


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_the_text_part_of_a_model_with_images(family, apply, masked, ids):
    text = TEXT | ({"model_type": "llama"} if family == "Llava" else {})
    if family == "Qwen2_5_VL":
        text |= {
            "hidden_size": 256,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        }
    text |= FAMILIES["Gemma3"] if family == "Gemma3" else {}
    text.pop("config", None)
    config = getattr(transformers, f"{family}Config")(text_config=text, **WITH_IMAGES[family])
    torch.manual_seed(0)
    model, prompt = (
        getattr(transformers, f"{family}ForConditionalGeneration")(config).eval(),
        ids(200),
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5 * 2)
    with masked(model):
        expected = model(input_ids=prompt).logits
    with apply(model, strict=True) as handle:
        torch.testing.assert_close(model(input_ids=prompt).logits, expected, **CLOSE)
        assert handle.stats()["sparse"] == 2


def test_the_docs_say_what_is_tested() -> None:
    page = (Path(__file__).parents[2] / "docs/served.md").read_text()
    section = page.split("\n## Architectures\n")[1].split("\n## ")[0]
    served, refused = section.split("\n### Refused\n")
    names = [
        re.findall(r"`(\w+)`", row.split("|")[2])
        for row in re.findall(r"^\|.*`\w+`.*$", served, re.M)
    ]
    found = {name for row in names for name in row}
    pictured = {f"{family}ForConditionalGeneration" for family in WITH_IMAGES}
    newer = {f"{family}ForCausalLM" for family in SINCE_5_24}
    assert found == {type(tiny_model(family)).__name__ for family in FAMILIES} | pictured | newer
    rows = re.findall(r"^\| `(\w+)`.*?\| (.*) \|$", refused, re.M)
    assert dict(rows) == {
        name: case["cause"] for name, case in REFUSED.items() if name not in newer
    }


def test_the_readme_names_the_versions_that_are_tested() -> None:
    root = Path(__file__).parents[2]
    oldest = re.findall(r'"transformers>=([\d.]+),', (root / "pyproject.toml").read_text())
    newest = re.findall(r"^transformers==(\d+\.\d+)", (root / "constraints.txt").read_text(), re.M)
    said = re.findall(
        r"tested with transformers ([\d.]+) and, by `.ci/oldest`, with\s+([\d.]+),",
        (root / "README.md").read_text(),
    )
    assert said == [(*newest, *oldest)]
