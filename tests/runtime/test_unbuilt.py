"""A kernel that turns out not to build: no thousands of queries go to the reference, which is
slower than dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from kernels import breaker, dispatch
from kernels.attention import cpu, reference
from kernels.breaker import building, failure
from runtime import Headwise, apply_dense
from tests.runtime.caches.feeding import fed

CLOSE = {"atol": 3e-4, "rtol": 1e-3}


@pytest.fixture(autouse=True)
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The fastest backend, here in place of a GPU's, fails as a Triton build does: at its first
    launch, not before."""
    monkeypatch.setattr(breaker, "_failed", {})
    dispatch.say_once.cache_clear()
    tried: list[int] = []

    def fails(*args: object, **how: object) -> None:
        tried.append(1)
        with building("attention", "here"):
            raise RuntimeError("PassManager::run failed\nat line 3")

    def refuses(*args: object, **how: object) -> None:
        pytest.fail("the reference was asked")

    former = cpu.supports
    monkeypatch.setattr(cpu, "sparse_attention", fails)
    monkeypatch.setattr(
        cpu, "supports", lambda q, k, v: former(q, k, v) or failure("attention", "here")
    )
    monkeypatch.setattr(reference, "sparse_attention", refuses)
    yield tried
    dispatch.say_once.cache_clear()


def test_the_first_call_is_the_model_s_own(
    unbuilt: Any, build: Any, apply: Any, ids: Any, warnings: Any
) -> None:
    model, prompt = build(), ids(200)
    expected = model(prompt).logits
    with apply(model, backend="auto") as handle:
        for _ in range(2):
            assert torch.equal(model(prompt).logits, expected)
        first, then = handle.stats()["dense"].items()
    assert first[0] == "a kernel failed with CannotBuildError" and "no fast kernel" in then[0]
    assert (first[1], then[1]) == (1, 3) and len(unbuilt) == 1
    assert any("PassManager::run failed" in line for line in warnings())


def test_strict_says_it(build: Any, apply: Any, ids: Any) -> None:
    with apply(model := build(), strict=True, backend="auto"):
        for _ in range(2):
            with pytest.raises(
                HeadwiseError, match="its kernel failed to build: RuntimeError: PassManager"
            ):
                model(ids(200))


def test_dense_by_our_kernel_too(unbuilt: Any, build: Any, ids: Any) -> None:
    model, prompt = build(), ids(200)
    expected = model(prompt).logits
    with apply_dense(model):
        assert torch.equal(model(prompt).logits, expected)
    assert unbuilt


def test_a_chunk_by_chosen_tokens_is_dense(
    unbuilt: Any, build: Any, decoding: Any, ids: Any
) -> None:
    model, tokens = build(num_hidden_layers=6), ids(300)
    expected = model(tokens).logits
    headwise: Headwise = decoding(model, prefill_ratio=0.5)
    with headwise.apply(model) as handle:
        torch.testing.assert_close(
            fed(model, tokens, (170, 130), handle.new_cache()), expected, **CLOSE
        )
        assert handle.stats()["sparse"] == 0
    assert unbuilt
