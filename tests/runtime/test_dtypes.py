"""Serving uses the dtypes and devices of its tensors.

Another default dtype or device changes nothing. Under autocast, queries, keys and values get one
dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

import artifacts
from kernels.patterns import LayerPlan, make
from runtime import LoadedArtifact, apply_dense
from runtime.autocast import in_one_dtype
from tests.default_dtype import OTHERS, default_dtype
from tests.runtime.batches import fed, real_from
from tests.runtime.conftest import SPARSE

# From 256 keys, Headwise's kernel also serves float32 decode steps; two follow the prompt.
N = 260
M = N + 2
POLICIES: dict[str, Any] = {
    "full": artifacts.Full(),
    "h2o": artifacts.H2O(heavy=30, recent=30),
    "h2o normalised": artifacts.H2O(heavy=0.2, recent=0.2, normalised=True),
    "h2o greedy": artifacts.H2O(heavy=90, recent=90, eviction="greedy"),
    "streaming": artifacts.Streaming(sinks=4, window=60),
    "streaming original": artifacts.Streaming(sinks=4, window=60, positions="original"),
    "snapkv": artifacts.SnapKV(budget=120, window=16, pool=5),
}
# Layer 0 is dense, layer 1 selects, layer 2 reads the selection.
LAYERS = {"num_hidden_layers": 3}
DECODE = artifacts.OmniKV(
    filter_layers=(1,), dense_layers=(0,), selector="last", window=4, budget=60
)
SECTIONS: dict[str, dict[str, Any]] = {
    "omnikv": {},
    "omnikv fraction": {"budget": 0.5, "selector": "exponential"},
    "omnikv uniform": {"selector": "uniform", "prefill_ratio": 0.1},
    "omnikv prefill": {"prefill_ratio": 0.5},
}
KINDS = {
    **SPARSE,
    "skip": artifacts.SkipSoftmax(scale_factor=100.0),
    "vs_covered": artifacts.VerticalSlash(vertical=100, slash=100, coverage=0.9),
    "bs_covered": artifacts.BlockSparse(blocks=3, coverage=0.9),
}
DENSE = ("kernel", "auto", "model")
HALF = torch.bfloat16


@pytest.fixture
def loaded(artifact_for, keeping) -> Callable[[Any, str], LoadedArtifact]:
    """Return loaded(model, way): an artifact with a policy, a decode section or a pattern."""

    def loaded(model: Any, way: str) -> LoadedArtifact:
        rows = [["a_64_64"] * 4] * model.config.num_hidden_layers
        if way == "unlike heads":
            table = {name: POLICIES[name] for name in ("snapkv", "h2o", "streaming", "full")}
            return keeping(model, table, [("snapkv", "h2o"), ("streaming", "full")], rows)
        if way in POLICIES:
            return keeping(model, POLICIES[way], patterns=rows)
        if way in SECTIONS:
            section = artifacts.Decode(omnikv=DECODE.model_copy(update=SECTIONS[way]))
            artifact = artifact_for(model, dense=True, dense_below=64)
            return LoadedArtifact(artifact.model_copy(update={"decode": section}))
        # Rows keep their name for the pattern of this way.
        return LoadedArtifact(
            artifact_for(model, rows=rows).model_copy(update={"patterns": {"a_64_64": KINDS[way]}})
        )

    return loaded


@pytest.fixture
def serve(loaded, ids) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Return serve(model, way, cache="own", backend="auto", offload="never").

    It returns the logits and stats() of padded prompts, of a chunk and a step after them, and of a
    step of other beams on a copy. `way` is a policy, a decode section, a pattern, or a dense
    backend.
    """
    tokens, real = ids(M, batch=2), real_from(M, 60, 0)
    beams = torch.tensor([1, 1]), torch.tensor([0, 3]), torch.ones_like(real)

    def serve(model, way, cache="own", backend="auto", offload="never"):
        if way in DENSE:
            handle = apply_dense(model, by=way)
        else:
            handle = loaded(model, way).apply(model, backend=backend)
        with handle:
            if cache == "none":
                logits = model(tokens, attention_mask=real, use_cache=False).logits
                return logits[real > 0], handle.stats()
            if cache == "own":
                past = handle.new_cache(offload=offload)
            else:
                past = DynamicCache(config=model.config)
            sizes, prompts = (160, N - 160, 1), real[:, :-1]
            logits = fed(model, tokens[:, :-1], sizes, past, attention_mask=prompts)[prompts > 0]
            past = copy.deepcopy(past)
            order, rows, mask = beams
            past.reorder_cache(order)
            past.batch_repeat_interleave(2)
            past.batch_select_indices(rows)
            last = model(tokens[:, -1:], attention_mask=mask, past_key_values=past).logits[:, 0]
            return torch.cat([logits, last]), handle.stats()

    return serve


def model_for(build: Any, way: str) -> Any:
    return build(**(LAYERS if way in SECTIONS else {}))


META = torch.device("meta")
SPARSELY = (*POLICIES, "unlike heads", *SECTIONS, *KINDS)


# The reference kernels serve any dtype but are slow; dense serving has none of them.
@pytest.mark.parametrize(
    ("way", "backend", "default", "offload"),
    [
        *((way, "auto", other, "never") for way in (*SPARSELY, *DENSE) for other in (HALF, META)),
        *((way, "reference", torch.float64, "never") for way in SPARSELY),
        *((way, "auto", META, "packed") for way in SECTIONS),
    ],
    ids=str,
)
def test_serving_with_other_default_is_unchanged(way, backend, default, offload, build, serve):
    model = model_for(build, way)
    expected, counts = serve(model, way, backend=backend, offload=offload)
    with default if default == META else default_dtype(default):
        actual, stats = serve(model, way, backend=backend, offload=offload)
    assert stats == counts
    most = 0 if default == META else 1e-4
    torch.testing.assert_close(actual, expected, atol=most, rtol=most)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_density_with_other_default_dtype_is_unchanged(kind, dtype):
    pattern = make(**KINDS[kind].model_dump())
    q = torch.randn(1, 2, N, 16, dtype=torch.float32)
    expected = LayerPlan([pattern] * 2, 1).build(q, q[:, :1]).density()
    with default_dtype(dtype):
        actual = LayerPlan([pattern] * 2, 1).build(q, q[:, :1]).density()
    assert actual.dtype == torch.float32 and torch.equal(actual, expected)


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Return the mean difference of logits relative to their size."""
    return float((actual.float() - expected).abs().mean() / expected.abs().mean())


@pytest.fixture
def assert_near(ids) -> Callable[..., None]:
    """Return assert_near(model, actual, expected).

    The logits' error under autocast must be near the error of dense attention.
    """

    def assert_near(model: Any, actual: Tensor, expected: Tensor) -> None:
        tokens = ids(M)
        dense = model(tokens).logits
        with torch.autocast("cpu", HALF):
            dense_error = error_of(model(tokens).logits, dense)
        assert 0 < error_of(actual, expected) < 1.5 * dense_error

    return assert_near


@pytest.mark.parametrize(
    ("way", "how"),
    [
        *((way, {}) for way in SPARSELY + DENSE),
        *((way, {"cache": name}) for way in ("a_64_64", *DENSE) for name in ("none", "plain")),
        *((way, {"offload": "packed"}) for way in SECTIONS),
    ],
    ids=str,
)
def test_serving_under_autocast_matches_no_autocast(way, how, build, serve, assert_near):
    model = model_for(build, way)
    expected, counts = serve(model, way, **how)
    with torch.autocast("cpu", HALF):
        actual, stats = serve(model, way, **how)
    assert stats == counts
    assert_near(model, actual, expected)


@pytest.mark.parametrize("offload", ["never", "packed"])
@pytest.mark.parametrize("way", ["a_64_64", "streaming", "omnikv", "omnikv prefill"])
def test_cache_continues_when_autocast_toggles(way, offload, build, loaded, ids, assert_near):
    model, tokens = model_for(build, way), ids(N + 6)
    parts = (N // 2, N // 2, 1, 2, 1, 2)

    def logits(handle: Any, casts: tuple[bool, ...]) -> Tensor:
        kv_cache, past = handle.new_cache(offload=offload), 0
        rows = []
        for size, cast in zip(parts, casts, strict=True):
            with torch.autocast("cpu", HALF, enabled=cast):
                part = tokens[:, past : past + size]
                rows.append(model(part, past_key_values=kv_cache).logits.float())
            past += size
        return torch.cat(rows, dim=1)

    with loaded(model, way).apply(model) as handle:
        expected = logits(handle, (False,) * 6)
        for first in (True, False):
            actual = logits(handle, (first, not first, first, not first, first, not first))
            assert_near(model, actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cache_under_autocast_keeps_dtype(dtype, build, loaded, ids):
    model = build()
    for way in ("a_64_64", "h2o"):
        with loaded(model, way).apply(model) as handle, torch.autocast("cpu", dtype):
            kv_cache = handle.new_cache()
            model(ids(N), past_key_values=kv_cache)
            assert {layer.dtype for layer in kv_cache.layers} == {dtype}
            half = handle.cache_bytes(kv_cache).device
        with loaded(model, way).apply(model) as handle:
            kv_cache = handle.new_cache()
            model(ids(N), past_key_values=kv_cache)
            assert half < 0.8 * handle.cache_bytes(kv_cache).device


def test_float64_model_under_autocast_stays_float64(build, loaded, ids):
    """Autocast ignores float64, too."""
    model = build().double()
    with loaded(model, "a_64_64").apply(model, backend="reference") as handle:
        expected = model(ids(N)).logits
        with torch.autocast("cpu", HALF):
            assert torch.equal(model(ids(N)).logits, expected)
        assert handle.stats() == {"sparse": 4, "dense": {}}


@pytest.mark.parametrize("way", ["a_64_64", "h2o", "omnikv"])
def test_queries_widened_by_rotation_use_weight_dtype(way, build, serve, monkeypatch):
    model = model_for(build, way).to(torch.bfloat16)
    ways = [(way, "never"), (way, "packed")]
    expected = [serve(model, way, offload=offload) for way, offload in ways]
    rotate = modeling_llama.apply_rotary_pos_emb

    def widened(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(x.float() for x in rotate(*args, **kwargs))

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", widened)
    for (way, offload), (logits, counts) in zip(ways, expected, strict=True):
        actual, stats = serve(model, way, offload=offload)
        assert stats == counts and torch.equal(actual, logits)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_in_one_dtype_under_autocast_is_autocasts_but_for_float64(wide):
    tensors = torch.randn(3, 2, dtype=wide).unbind()
    with torch.autocast("cpu", HALF):
        found = {x.dtype for x in in_one_dtype(*tensors)}
    assert found == {torch.bfloat16 if wide == torch.float32 else torch.float64}
    assert {x.dtype for x in in_one_dtype(*tensors)} == {wide}
