"""Whatever goes wrong in one request: it fails or is served densely, is said once, and the next one
is right."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria

from artifacts import HeadwiseError
from kernels.native import build as native
from kernels.patterns import LayerPlan
from runtime import Headwise
from tests.runtime.omnikv import CLOSE, LAYERS, steps

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: "
    "can't allocate memory: you tried to"
)
FAULTS: dict[str, Callable[[], Exception]] = {
    "out of memory": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB"
    ),
    "no memory on the CPU": lambda: RuntimeError(f"{ALLOCATOR} allocate 99 bytes."),
    "no memory in C++": lambda: RuntimeError("std::bad_alloc"),
    "no memory in Python": lambda: MemoryError(),
    "launch": lambda: RuntimeError("CUDA error: invalid configuration argument\nand more lines"),
    "compiler": lambda: subprocess.CalledProcessError(1, ["gcc"]),
    "disk": lambda: OSError("No space left on device"),
}


class Failing:
    """In place of a function: fails in the calls that it is told, by number, and counts."""

    def __init__(
        self, function: Callable[..., Any], calls: set[int], error: Callable[[], Exception]
    ) -> None:
        self.function, self.calls, self.error, self.count = function, calls, error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count in self.calls:
            raise self.error()
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("where", "name"), [*(("attention", name) for name in FAULTS), ("build", "compiler")]
)
def test_a_kernel_that_fails_is_served_densely_and_the_next_call_is_not(
    where: str, name: str, build, apply, ids, warnings, monkeypatch
) -> None:
    model, prompt = build(), ids(200)
    dense = model(prompt).logits
    with apply(model) as handle:
        sparse = model(prompt).logits
        if where == "attention":
            from runtime.attention import function as served

            failing = Failing(served.launch, {1, 2, 5}, FAULTS[name])
            monkeypatch.setattr("runtime.attention.function.launch", failing)
        else:
            failing = Failing(LayerPlan.build, {1, 2, 5}, FAULTS[name])
            monkeypatch.setattr(
                LayerPlan, "build", lambda *args, **kwargs: failing(*args, **kwargs)
            )
        assert torch.equal(model(prompt).logits, dense)
        assert torch.equal(model(prompt).logits, sparse)
        model(prompt)
        assert torch.equal(model(prompt).logits, sparse)
        stats = handle.stats()
    with apply(model, strict=True), pytest.raises(HeadwiseError, match="cannot serve this call"):
        failing.count = 0
        model(prompt)
    assert len(warnings()) == 1 and warnings()[0].startswith("serving densely: ")
    (reason,) = stats["dense"]
    assert reason in warnings()[0] and stats["dense"][reason] == 3 and stats["sparse"] == 7
    assert reason == (
        "out of memory"
        if "memory" in name
        else f"a kernel failed with {type(FAULTS[name]()).__name__}"
    )


@pytest.mark.parametrize("error", [ValueError("q must be"), AssertionError("bug")])
def test_mistakes_of_ours_are_not_hidden(error: Exception, build, apply, ids, monkeypatch) -> None:
    from runtime.attention import function as served

    model = build()
    with apply(model):
        monkeypatch.setattr(
            "runtime.attention.function.launch", Failing(served.launch, {1}, lambda: error)
        )
        with pytest.raises(type(error)):
            model(ids(200))


@pytest.mark.parametrize(
    "broken", [{"CXX": "no-such-compiler"}, {"HEADWISE_CACHE": "/proc/version"}]
)
def test_without_a_compiler_or_a_cache_folder_all_is_dense(
    broken: dict[str, str], build, apply, ids, warnings, monkeypatch
) -> None:
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


class Cancelled(StoppingCriteria):
    """Ends a generation from the inside at its n-th token."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise self.error("cancelled")
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("how", "error"), [("criterion", KeyboardInterrupt), ("layer", RuntimeError)]
)
def test_after_a_cancelled_generation_the_next_is_right(
    how: str, error: type[BaseException], build, decoding, ids
) -> None:
    model, prompt, other = build(**LAYERS), ids(150), ids(150, seed=3)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}

    def interrupt(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise error("cancelled")

    calls, hook = 0, None
    with decoding(model).apply(model) as handle:
        expected = model.generate(prompt, past_key_values=handle.new_cache(), **options)
        more: dict[str, Any] = {}
        if how == "criterion":
            more = {"stopping_criteria": [Cancelled(error, 3)]}
        else:
            # Between a filter layer and those that it serves.
            hook = model.model.layers[3].self_attn.register_forward_pre_hook(interrupt)
        with pytest.raises(error, match="cancelled"):
            model.generate(other, past_key_values=handle.new_cache(), **options, **more)
        if hook is not None:
            hook.remove()
        assert torch.equal(
            model.generate(prompt, past_key_values=handle.new_cache(), **options), expected
        )


def test_a_filter_layer_that_fails_leaves_no_choice_behind(
    build, decoding, ids, monkeypatch
) -> None:
    """A request of the same length before it chose tokens; the layers served must not take
    those."""
    from runtime.omnikv import decode

    model, prompt, other = build(**LAYERS), ids(150), ids(150, seed=3)
    loaded = decoding(model)
    expected = steps(model, prompt, ids(1, seed=9), DynamicCache(config=model.config))
    with loaded.apply(model) as handle:
        steps(model, other, ids(1, seed=9), handle.new_cache())
        cache = handle.new_cache()
        model(prompt, past_key_values=cache, use_cache=True)
        # The layers 0, 1 and 2 attend to everything; 2 and 4 filter.
        failing = Failing(decode.decode_attention, {3, 4}, FAULTS["launch"])
        monkeypatch.setattr("runtime.omnikv.decode.decode_attention", failing)
        found = model(ids(1, seed=9), past_key_values=cache, use_cache=True).logits
        dense = handle.stats()["dense"]
    torch.testing.assert_close(found, expected[:, -1:], **CLOSE)
    assert dense["a kernel failed with RuntimeError"] == 2


def test_a_cache_of_another_model_fails_and_the_next_request_is_right(build, apply, ids) -> None:
    model, other, prompt = build(), build(num_key_value_heads=4, head_dim=32), ids(200)
    strange = DynamicCache(config=other.config)
    other(ids(150), past_key_values=strange, use_cache=True)
    with apply(model):
        expected = model(prompt).logits
        with pytest.raises(RuntimeError):
            model(prompt, past_key_values=strange, use_cache=True)
        assert torch.equal(model(prompt).logits, expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_cache_with_layers_of_unlike_lengths_is_served_as_without_us(
    layer: int, build, apply, ids, warnings
) -> None:
    model, prompt = build(), ids(200)

    def broken() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model(ids(150), past_key_values=cache, use_cache=True)
        held = cache.layers[layer]
        held.keys, held.values = held.keys[:, :, :-7], held.values[:, :, :-7]
        return cache

    def outcome() -> Any:
        try:
            return model(prompt, past_key_values=broken(), use_cache=True).logits
        except RuntimeError as error:
            return str(error)

    expected = outcome()
    with apply(model) as handle:
        sparse = model(prompt).logits
        found = outcome()
        assert type(found) is type(expected)
        assert torch.equal(model(prompt).logits, sparse)
        assert (
            sum("the cache holds other keys" in said for said in warnings()) == len(warnings()) == 1
        )
        assert "the cache holds other keys than the mask is for" in handle.stats()["dense"]


@pytest.fixture
def nan_hook() -> Iterator[Callable[[Any, int, int], None]]:
    """nan_hook(model, row, at): the hidden states of token `at` of sequence `row` are NaN from the
    first layer on."""
    hooks = []

    def poison(model: Any, row: int, at: int) -> None:
        def change(module: Any, args: Any, out: Tensor) -> Tensor:
            out = out.clone()
            if out.shape[0] > row and out.shape[1] > at:
                out[row, at] = float("nan")
            return out

        hooks.append(model.get_input_embeddings().register_forward_hook(change))

    yield poison
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("backend", "padded"), [("reference", False), ("cpu", True)])
def test_nan_in_one_sequence_stays_in_it(
    padded: bool, backend: str, build, artifact_for, ids, nan_hook
) -> None:
    model, prompt = build(), ids(300, batch=3)
    real = torch.ones_like(prompt)
    if padded:
        real[0, :30] = 0
    with Headwise(artifact_for(model)).apply(model, backend=backend) as handle:
        clean = model(prompt, attention_mask=real).logits
        nan_hook(model, 1, 250)
        found = model(prompt, attention_mask=real).logits
        others = torch.tensor([0, 2])
        torch.testing.assert_close(found[others], clean[others])
        assert found[1, 250:].isnan().any() and found[1, 250].isnan().all()
        assert handle.stats()["sparse"] == 4
