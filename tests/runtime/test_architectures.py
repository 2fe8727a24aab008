"""Prefill and decode of each architecture: batches, caches, compilation and refusals."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache

import artifacts
from artifacts import HeadwiseError
from runtime import LoadedArtifact, apply_dense
from runtime.layers import attention_layers, full_layers, layer_kinds
from tests.runtime.batches import LAYOUTS, batch_inputs, fed, real_of
from tests.runtime.omnikv import CLOSE, steps
from tests.runtime.test_cut_queries import FAMILIES as SHARES
from tests.runtime.tiny import (
    FAMILIES,
    HYBRID,
    REFUSED,
    SINCE_5_24,
    WITH_IMAGES,
    pictured_model,
    refused_model,
)

TWO = {"num_hidden_layers": 2, **HYBRID}
LATENT, SINKS = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite"), ("GptOss",)
PRUNABLE = [family for family in FAMILIES if family not in (*LATENT, *SINKS)]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "left") for family in FAMILIES),
        *(("Llama", layout) for layout in LAYOUTS if layout != "left"),
        *((family, layout) for family in ("Gemma3", "GptOss") for layout in ("129", "right")),
    ],
)
def test_batch_matches_single_sequences_masked_by_index(family, layout, build, apply, masked, ids):
    # Windows of sliding layers also hold right padding: no token follows it.
    more = 0 if layout == "right" else 1
    model, real = build(family), real_of(layout, more)
    width = real.shape[1] - more
    tokens = ids(width + more, batch=len(real))
    expected = {}
    with masked(model):
        for row, mask in enumerate(real):
            if n := int(mask[:width].sum()):
                expected[row] = fed(model, tokens[row, mask > 0][None], (n, 1))[0]
    with apply(model, strict=True) as handle:
        actual = fed(model, tokens, (width, 1), attention_mask=real)
        stats = handle.stats()
    assert stats["sparse"] > 0 and actual.isfinite().all()
    assert (stats["dense"].get("decode", 0) > 0) == (more > 0)
    for row, theirs in expected.items():
        # LongRoPE uses the angles of the longest sequence in a batch.
        if row == 0 or family != "Phi3LongRoPE":
            torch.testing.assert_close(actual[row, real[row] > 0], theirs, **CLOSE)
    if layout == "left":
        dense = model(tokens[:1]).logits[0]
        assert (dense - expected[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "changes", "layouts", "dense", "part"),
    [
        ("Llama", {"num_hidden_layers": 1}, ("left",), None, "model"),
        ("Llama", {"num_hidden_layers": 1}, ("129",), {"dense by kernel": 1}, "attention"),
        *(
            pytest.param(*case, "model", marks=pytest.mark.exhaustive)
            for case in (
                ("Llama", {"num_hidden_layers": 1}, ("129",), {"dense by kernel": 1}),
                ("Gemma3", TWO, ("left",), {"dense by kernel": 1, "window by kernel": 1}),
                ("Gemma3", TWO, ("left",), None),
                ("Llama", {"num_hidden_layers": 1}, ("right",), None),
                ("GptOss", {}, ("alike and empty", "right"), None),
            )
        ),
    ],
)
def test_compiled_batch_matches_uncompiled(
    family, changes, layouts, dense, part, graphs, build, apply, ids, monkeypatch
):
    """Cover patterns and, without an artifact, the dense kernels."""
    model = build(family, **changes)
    module = model if part == "model" else model.model.layers[0].self_attn
    compiled = torch.compile(module.forward, backend=graphs)
    applied = partial(apply, strict=True) if dense is None else apply_dense
    for layout in layouts:
        real = real_of(layout)
        tokens = ids(real.shape[1], batch=len(real))
        with applied(model) as handle:
            expected = model(tokens, **batch_inputs(real)).logits
            baseline = handle.stats()
        with applied(model) as handle:
            with monkeypatch.context() as patch:
                patch.setattr(module, "forward", compiled)
                actual = model(tokens, **batch_inputs(real)).logits
            assert handle.stats() == baseline
        if dense is None:
            assert baseline["sparse"] > 0
        else:
            assert baseline["dense"] == dense
        torch.testing.assert_close(actual[real > 0], expected[real > 0], **CLOSE)


update = Cache.update


def cloning(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Update a cache, and return clones of its keys and values."""
    return tuple(states.clone() for states in update(*args, **kwargs))


def whole(model: Any, layer: int) -> dict[str, Any]:
    """Return sections, by name, that do not change the model's output."""
    modules = attention_layers(model)
    full = full_layers(modules)
    layers = range(model.config.num_hidden_layers)
    rows = tuple("full" if layer in full else None for layer in layers)
    every = artifacts.OmniKV(
        filter_layers=(layer,), dense_layers=(), selector="uniform", window=4, budget=200
    )
    return {
        "kv_cache": artifacts.KVCache(policies={"full": artifacts.Full()}, layers=rows),
        "decode": artifacts.Decode(omnikv=every),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_sections_that_keep_all_tokens_change_nothing(
    family, build, artifact_for, ids, monkeypatch
):
    model, prompt, forced = build(family), ids(150), ids(2, seed=1)
    expected = steps(model, prompt, forced)
    first = full_layers(attention_layers(model))[0]
    sections = whole(model, first)
    served = [{} if family in SINKS else {"decode": sections["decode"]}]
    if family in PRUNABLE:
        served.append({"kv_cache": sections["kv_cache"]})
    for section in served:
        artifact = artifact_for(model, dense=True).model_copy(update=section)
        with LoadedArtifact(artifact).apply(model, strict=True, backend="reference") as handle:
            cache = handle.new_cache(offload="packed")
            with monkeypatch.context() as patch:
                if "decode" in section:
                    # A filter layer finds its cache by the update, not by the keys.
                    patch.setattr(Cache, "update", cloning)
                actual = steps(model, prompt, forced, cache)
            stats = handle.stats()
        torch.testing.assert_close(actual, expected, **CLOSE)
        if "kv_cache" in section:
            kinds = layer_kinds(attention_layers(model)).values()
            assert stats["kept"] == 3 * sum(kind != "other" for kind in kinds)
        else:
            assert stats["sparse"] > 0
            if section:
                # Scores of three last queries of the prompt.
                assert cache.layers[first].history.shape == (1, 3, 150)


SHARED = r"^layer 2 \(\w+\) reads the keys and values of another layer: the {} section"


@pytest.mark.parametrize(
    ("family", "section", "cause"),
    [
        ("DeepseekV3", "kv_cache", r"layer 0 \(\w+\) caches latents, not keys and values"),
        ("GptOss", "kv_cache", r"layer 0 \(\w+\) has learned attention sinks"),
        ("GptOss", "decode", r"has learned attention sinks: the decode section"),
        *((family, name, SHARED) for family in SHARES for name in ("kv_cache", "decode")),
    ],
)
def test_apply_rejects_section_unsupported_by_layer(family, section, cause, build, artifact_for):
    model, cause = build(family, **SHARES.get(family, {})), cause.format(section)
    sections = whole(model, 1)
    headwise = LoadedArtifact(artifact_for(model).model_copy(update={section: sections[section]}))
    for ask in (headwise.apply, headwise.new_cache):
        with pytest.raises(HeadwiseError, match=cause):
            ask(model)
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GptOss"])
def test_dense_artifact_rounding_error_matches_model(family, build, apply, ids):
    model = build(family).bfloat16()
    prompt = ids(200, batch=2)
    rounded = model(prompt).logits
    with apply(model, dense=True):
        actual = model(prompt).logits
    exact = build(family)(prompt).logits
    assert (actual - exact).norm() < 1.5 * (rounded - exact).norm() + 1e-3


def test_index_uses_model_scale(build, apply, masked, ids):
    model, prompt = build("Gemma3", query_pre_attn_scalar=100_000), ids(600)
    with masked(model):
        expected = model(prompt).logits
    with apply(model, strict=True):
        torch.testing.assert_close(model(prompt).logits, expected, **CLOSE)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_apply_rejects_unsupported_model_with_cause(name, build, artifact_for):
    model = refused_model(name)
    with pytest.raises(HeadwiseError) as error:
        LoadedArtifact(artifact_for(build())).apply(model)
    assert str(error.value) == f"{name} {REFUSED[name]['cause']}"


@pytest.mark.parametrize("family", ["Mistral", "Mixtral"])
def test_all_sliding_model_is_unchanged(family, build, apply, ids, warnings):
    model, prompt = build(family, sliding_window=40), ids(200)
    expected = model(prompt).logits
    with apply(model) as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["sparse"] == 0
    assert len(warnings()) == 1 and "slides" in warnings()[0]


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_text_part_of_image_model_matches_masked_model(family, apply, masked, ids):
    model, prompt = pictured_model(family), ids(200)
    with masked(model):
        expected = model(input_ids=prompt).logits
    with apply(model, strict=True) as handle:
        torch.testing.assert_close(model(input_ids=prompt).logits, expected, **CLOSE)
        assert handle.stats()["sparse"] == 2


def test_docs_list_tested_architectures():
    page = (Path(__file__).parents[2] / "docs/served.md").read_text()
    section = page.split("\n## Architectures\n")[1].split("\n## ")[0]
    served, refused = section.split("\n### Refused\n")
    rows = re.findall(r"^\|.*`\w+`.*$", served, re.M)
    actual = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[2])}
    models = [sizes.get("model", family) for family, sizes in FAMILIES.items()]
    pictured = {f"{family}ForConditionalGeneration" for family in WITH_IMAGES}
    newer = {f"{family}ForCausalLM" for family in SINCE_5_24}
    assert actual == {f"{name}ForCausalLM" for name in models} | pictured | newer
    causes = dict(re.findall(r"^\| `(\w+)`.*?\| (.*) \|$", refused, re.M))
    assert causes == {name: REFUSED[name]["cause"] for name in REFUSED.keys() - newer}


def test_readme_names_tested_versions():
    root = Path(__file__).parents[2]
    oldest = re.findall(r'"transformers>=([\d.]+),', (root / "pyproject.toml").read_text())
    newest = re.findall(r"^transformers==(\d+\.\d+)", (root / "constraints.txt").read_text(), re.M)
    readme = (root / "README.md").read_text()
    versions = re.findall(
        r"transformers ([\d.]+) or newer .+ tested with ([\d.]+) and ([\d.]+)", readme
    )
    assert versions == [(*oldest, *oldest, *newest)]
