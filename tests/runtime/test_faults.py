"""Faults in one request: it fails or runs densely, warns once, and the next request is correct."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from artifacts import HeadwiseError
from kernels import registry
from kernels.attention import cpu
from kernels.decode import cpu as decode_cpu
from kernels.native import build as native
from kernels.patterns import LayerPlan
from kernels.reference import Attention
from kernels.registry import build_failure, build_guard
from runtime import apply_dense
from tests.runtime.batches import fed
from tests.runtime.conftest import POLICIES
from tests.runtime.omnikv import CLOSE, LAYERS, steps

# Kernel errors and the names that count them.
FAULTS: list[tuple[Exception, str]] = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "out of memory"),
    (RuntimeError("std::bad_alloc"), "out of memory"),
    (MemoryError(), "out of memory"),
    (RuntimeError("CUDA error: invalid argument\nmore"), "a kernel failed with RuntimeError"),
    (subprocess.CalledProcessError(1, ["gcc"]), "a kernel failed with CalledProcessError"),
    (OSError("No space left on device"), "a kernel failed with OSError"),
]


class Failing:
    """Function replacement that counts its calls and fails in the listed ones."""

    def __init__(self, function: Callable[..., Any], calls: set[int], error: BaseException) -> None:
        self.function, self.calls, self.error, self.count = function, calls, error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count in self.calls:
            raise self.error
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("error", "name", "where"),
    [*((*fault, "run_by") for fault in FAULTS), (*FAULTS[0], "build"), (*FAULTS[-1], "build")],
    ids=str,
)
def test_kernel_failure_is_dense_for_one_call(
    error, name, where, build, apply, ids, warnings, monkeypatch
):
    model, prompt = build(), ids(200)
    dense = model(prompt).logits
    at = registry if where == "run_by" else LayerPlan
    with apply(model) as handle:
        sparse = model(prompt).logits
        failing = Failing(getattr(at, where), {1, 2, 5}, error)
        monkeypatch.setattr(at, where, lambda *args, **kwargs: failing(*args, **kwargs))
        assert torch.equal(model(prompt).logits, dense)
        assert torch.equal(model(prompt).logits, sparse)
        model(prompt)
        assert torch.equal(model(prompt).logits, sparse)
        stats = handle.stats()
    with apply(model, strict=True), pytest.raises(HeadwiseError, match="cannot serve this call"):
        failing.count = 0
        model(prompt)
    assert stats == {"sparse": 7, "dense": {name: 3}}
    assert len(warnings()) == 1 and warnings()[0].startswith(f"serving densely: {name}")


@pytest.mark.parametrize("error", [ValueError("q must be"), AssertionError("bug")], ids=str)
def test_programming_errors_are_raised(error, build, apply, ids, monkeypatch):
    model = build()
    monkeypatch.setattr(registry, "run_by", Failing(registry.run_by, {1}, error))
    with apply(model), pytest.raises(type(error)):
        model(ids(200))


@pytest.mark.parametrize(
    "broken", [{"CXX": "no-such-compiler"}, {"HEADWISE_CACHE": "/proc/version"}]
)
def test_missing_compiler_or_build_folder_is_dense(
    broken, build, apply, ids, warnings, monkeypatch
):
    model, prompt = build(), ids(200)
    expected = model(prompt).logits
    for name, value in broken.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native, "load", native.load.__wrapped__)
    with apply(model, backend="auto") as handle:
        for _ in range(2):
            assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["sparse"] == 0
    assert len(warnings()) == 1 and warnings()[0].startswith("serving densely: no fast kernel: ")
    with (
        apply(model, backend="auto", strict=True),
        pytest.raises(HeadwiseError, match="no fast kernel"),
    ):
        model(prompt)
    monkeypatch.undo()
    with apply(model, backend="auto", strict=True):
        model(prompt)


def test_generate_after_cancelled_generation_is_correct(build, decoding, ids):
    model, prompt, other = build(**LAYERS), ids(150), ids(150, seed=3)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    forward = model.model.layers[3].self_attn.forward
    with decoding(model).apply(model) as handle:
        expected = model.generate(prompt, past_key_values=handle.new_cache(), **options)
        # Interrupt the third step, between a filter layer and the layers it serves.
        model.model.layers[3].self_attn.forward = Failing(forward, {4}, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            model.generate(other, past_key_values=handle.new_cache(), **options)
        model.model.layers[3].self_attn.forward = forward
        actual = model.generate(prompt, past_key_values=handle.new_cache(), **options)
    assert torch.equal(actual, expected)


def test_filter_layer_failure_keeps_no_selection(build, decoding, ids, monkeypatch):
    """Layers must not use the selection of an earlier request with the same length."""
    from runtime.omnikv import decode

    model, prompt, other = build(**LAYERS), ids(150), ids(150, seed=3)
    loaded = decoding(model)
    expected = steps(model, prompt, ids(1, seed=9))
    with loaded.apply(model) as handle:
        steps(model, other, ids(1, seed=9), handle.new_cache())
        cache = handle.new_cache()
        model(prompt, past_key_values=cache, use_cache=True)
        # Layers 0, 1 and 2 attend to all tokens; 2 and 4 filter.
        failing = Failing(decode.decode_attention, {3, 4}, RuntimeError("CUDA error"))
        monkeypatch.setattr("runtime.omnikv.decode.decode_attention", failing)
        actual = model(ids(1, seed=9), past_key_values=cache, use_cache=True).logits
        dense = handle.stats()["dense"]
    torch.testing.assert_close(actual, expected[:, -1:], **CLOSE)
    assert dense["a kernel failed with RuntimeError"] == 2


@pytest.mark.parametrize("layer", [0, 1])
def test_cache_layers_of_unequal_lengths_match_plain_model(layer, build, apply, ids, warnings):
    model, prompt = build(), ids(200)

    def broken():
        cache = DynamicCache(config=model.config)
        model(ids(150), past_key_values=cache, use_cache=True)
        held = cache.layers[layer]
        held.keys, held.values = held.keys[:, :, :-7], held.values[:, :, :-7]
        return cache

    def outcome():
        try:
            return model(prompt, past_key_values=broken(), use_cache=True).logits
        except RuntimeError as error:
            return str(error)

    expected = outcome()
    with apply(model) as handle:
        sparse = model(prompt).logits
        assert type(outcome()) is type(expected)
        assert torch.equal(model(prompt).logits, sparse)
        assert "the cache holds other keys than the mask is for" in handle.stats()["dense"]
    assert len(warnings()) == 1 and "the cache holds other keys" in warnings()[0]


@pytest.fixture
def unbuilt(monkeypatch):
    """Make the fastest backend fail at its first launch, as a Triton build does.

    The reference, which is slower than dense attention, must not run.
    """
    monkeypatch.setattr(registry, "_failed", {})
    registry.log_once.cache_clear()
    tried: list[int] = []

    def fails(call):
        tried.append(1)
        with build_guard("attention", "here"):
            raise RuntimeError("PassManager::run failed\nat line 3")

    former = cpu.supports
    monkeypatch.setattr(cpu, "run", fails)
    monkeypatch.setattr(
        cpu, "supports", lambda call: former(call) or build_failure("attention", "here")
    )
    monkeypatch.setattr(Attention, "run", lambda call: pytest.fail("asked"))
    yield tried
    registry.log_once.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_failing_kernel_is_called_once_per_forward_and_step(
    backend, build, apply, ids, monkeypatch
):
    """The first layer of a prefill decides for the whole forward pass."""
    model, prompt, cache = build(), ids(300), DynamicCache()
    calls: list[str] = []
    for op, module in (("attention", cpu), ("decode", decode_cpu)):
        supports = module.supports
        monkeypatch.setattr(
            module, "supports", lambda call, op=op, ask=supports: calls.append(op) or ask(call)
        )
    with apply(model, backend=backend) as handle:
        model(prompt, past_key_values=cache)
        assert handle.stats()["sparse"] == 2 and calls == ["attention"]
        model(ids(1), past_key_values=cache)
        assert handle.stats()["dense"] == {"decode by kernel": 2}
    assert calls == ["attention", "decode", "decode"]


def test_kernel_build_failure_is_tried_once(unbuilt, build, apply, ids, warnings):
    model, prompt = build(), ids(200)
    expected = model(prompt).logits
    with apply(model, backend="auto") as handle:
        for _ in range(2):
            assert torch.equal(model(prompt).logits, expected)
        first, then = handle.stats()["dense"].items()
    assert first == ("a kernel failed with CannotBuildError", 1)
    assert "no fast kernel" in then[0] and then[1] == 3 and len(unbuilt) == 1
    assert any("PassManager::run failed" in line for line in warnings())
    with apply(model, strict=True, backend="auto"):
        for _ in range(2):
            why = "its kernel failed to build: RuntimeError: PassManager"
            with pytest.raises(HeadwiseError, match=why):
                model(prompt)


def test_dense_kernel_build_failure_uses_model_attention(unbuilt, build, ids):
    model, prompt = build(), ids(200)
    expected = model(prompt).logits
    with apply_dense(model):
        assert torch.equal(model(prompt).logits, expected)
    assert unbuilt


def test_chunk_by_selected_tokens_is_dense_if_no_kernel_builds(unbuilt, build, decoding, ids):
    model, tokens = build(**LAYERS), ids(300)
    expected = model(tokens).logits
    with decoding(model, prefill_ratio=0.5).apply(model) as handle:
        actual = fed(model, tokens, (170, 130), handle.new_cache())
        assert handle.stats()["sparse"] == 0
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert unbuilt


@pytest.mark.parametrize("offload", ["never", "packed"])
@pytest.mark.parametrize("changes", [{"selector": "uniform"}, {"prefill_ratio": 0.5}], ids=str)
def test_decode_section_without_kernels_is_dense(
    changes, offload, build, decoding, ids, unbuildable, warnings
):
    model, tokens = build(**LAYERS), ids(260)
    expected = fed(model, tokens, (128, 128, 1))
    with decoding(model, **changes).apply(model) as handle:
        actual = fed(model, tokens, (128, 128, 1), handle.new_cache(offload=offload))
        assert handle.stats()["decode"] == 0
        assert handle.stats()["dense"]["no fast kernel"] > 0
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert any("its kernel failed to build" in line for line in warnings())
    with (
        decoding(model, **changes).apply(model, strict=True) as handle,
        pytest.raises(HeadwiseError, match="its kernel failed to build"),
    ):
        fed(model, tokens, (128, 128, 1), handle.new_cache(offload=offload))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "full"])
def test_cache_that_drops_tokens_without_kernels_raises(policy, build, keeping, ids, unbuildable):
    model = build()
    with keeping(model, POLICIES[policy]).apply(model) as handle:
        cache = handle.new_cache()
        for _ in range(2):
            with pytest.raises(HeadwiseError) as raised:
                model(ids(150), past_key_values=cache)
            reason = str(raised.value)
            if not reason.startswith("this cache holds tokens that no attention saw"):
                assert "a cache that drops tokens cannot serve this call: no fast kernel" in reason
                assert "cpu: its kernel failed to build: RuntimeError: no assembler" in reason
        assert reason.startswith("this cache holds tokens that no attention saw")
        with pytest.raises(HeadwiseError, match="cannot serve this call: no fast kernel"):
            model(ids(1), past_key_values=handle.new_cache())
    with (
        keeping(model, POLICIES[policy]).apply(model, backend="cpu") as handle,
        pytest.raises(HeadwiseError, match="'cpu' cannot serve this call: its kernel failed"),
    ):
        model(ids(150), past_key_values=handle.new_cache())
