"""A kernel that cannot be built is tried once and remembered, and the next backend serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernels import breaker, dispatch, triton_calls
from kernels.attention import cpu, sparse_attention, triton, triton_launch
from kernels.attention.triton_launch import How
from kernels.breaker import CannotBuildError, building, failure
from kernels.decode import cpu as decode
from kernels.decode import decode_attention
from kernels.decode import triton as decode_triton
from kernels.patterns.dense import dense_index
from kernels.triton_calls import KernelCall


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(breaker, "_failed", {})
    dispatch.say_once.cache_clear()
    yield
    dispatch.say_once.cache_clear()


@pytest.mark.parametrize("op", ["attention", "decode"])
def test_a_build_that_fails_is_tried_once(
    op: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CPU in place of a GPU: its fastest backend fails as a Triton build does."""
    tried = []
    module = cpu if op == "attention" else decode

    def fails(*args: object, **how: object) -> None:
        tried.append(1)
        with building(op, "here"):
            raise RuntimeError("PassManager::run failed\nat line 3")

    monkeypatch.setattr(module, f"{'sparse' if op == 'attention' else 'decode'}_attention", fails)
    monkeypatch.setattr(module, "supports", lambda q, k, v: failure(op, "here"))
    x = torch.randn(1, 2, 5, 16)

    def call(backend: str = "auto") -> torch.Tensor:
        if op == "attention":
            return sparse_attention(x, x, x, dense_index(1, 2, 5, 5, x.device), backend=backend)
        return decode_attention(x, x, x, backend=backend).out

    expected = call("reference")
    reason = "its kernel failed to build: RuntimeError: PassManager::run failed"
    with caplog.at_level(logging.WARNING, "headwise"):
        for _ in range(3):
            assert torch.equal(call(), expected)
    assert len(tried) == 1
    assert caplog.messages == [f"backend 'cpu' not used: {reason}"]
    assert dispatch.why_not(x, x, x, op)["cpu"] == reason and breaker.failures() == {
        f"{op}, here": reason
    }
    with pytest.raises(ValueError, match=f"backend 'cpu' cannot serve this call: {reason}"):
        call("cpu")
    breaker._failed.clear()
    with pytest.raises(ValueError, match=f"backend 'cpu' cannot serve this call: {reason}"):
        call("cpu")
    assert len(tried) == 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("Triton Error [CUDA]: illegal memory access")]
)
def test_what_a_device_reports_is_no_build_that_failed(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, building("here"):
        raise error
    assert not isinstance(raised.value, CannotBuildError) and failure("here") is None


class Builds:
    """Launches that do nothing, but fail to build where `fails` says so of what is compiled in."""

    def __init__(self, fails: Callable[[How], bool]) -> None:
        self.fails = fails
        self.tried: list[How] = []

    def __call__(self, call: KernelCall) -> None:
        if how := call.constants.get("H"):
            self.tried.append(how)
            if self.fails(how):
                raise RuntimeError("out of resource: shared memory")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[How], bool]], Builds]:
    """builds(fails): attention is Triton's on the CPU, its builds fail so."""
    monkeypatch.setattr(triton_launch, "_INTERPRETED", True)
    monkeypatch.setattr(dispatch, "_by_device", lambda kind: dispatch.BACKENDS)

    def builds(fails: Callable[[How], bool]) -> Builds:
        made = Builds(fails)
        monkeypatch.setattr(triton_calls, "_run", made)
        return made

    return builds


def attend(**how: Any) -> torch.Tensor:
    x = torch.randn(1, 2, 70, 16, generator=torch.Generator().manual_seed(0))
    return sparse_attention(
        x, x, x, dense_index(1, 2, 70, 70, x.device, window=how.pop("window", None)), **how
    )


def test_a_variant_that_fails_takes_no_other_with_it(
    builds: Callable[[Callable[[How], bool]], Builds],
) -> None:
    made = builds(lambda how: how.window)
    for _ in range(2):
        # Another backend serves these, each time; and Triton the others, which nobody computes
        # here.
        torch.testing.assert_close(attend(window=5), attend(window=5, backend="reference"))
        attend()
    assert [how.window for how in made.tried] == [True, False, False]
    x = torch.ones(1, 2, 70, 16)
    assert triton.supports(x, x, x) is None
    with pytest.raises(
        ValueError, match="backend 'triton' cannot serve this call: its kernel failed to build"
    ):
        attend(window=5, backend="triton")


def test_decode_that_fails_with_scores_serves_without(
    builds: Callable[[Callable[[How], bool]], Builds], monkeypatch: pytest.MonkeyPatch
) -> None:
    builds(lambda how: False)

    def fails(call: KernelCall) -> None:
        if call.constants.get("KEEP"):
            raise RuntimeError("out of resource: registers")

    monkeypatch.setattr(triton_calls, "_run", fails)
    x = torch.randn(1, 2, 70, 16)
    found, expected = (
        decode_attention(x[:, :, -1:], x, x, scores="sum", backend=name) for name in ("auto", "cpu")
    )
    torch.testing.assert_close(found.out, expected.out)
    assert decode_triton.supports(x, x, x) is None


def test_where_the_least_fails_nothing_is_tried_again(
    builds: Callable[[Callable[[How], bool]], Builds],
) -> None:
    made = builds(lambda how: True)
    for window in (None, 5):
        torch.testing.assert_close(
            attend(window=window), attend(window=window, backend="reference")
        )
    x = torch.ones(1, 2, 70, 16)
    assert len(made.tried) == 1 and "failed to build" in str(triton.supports(x, x, x))
    # Of another head dim it may build.
    assert triton.supports(x[..., :8], x[..., :8], x[..., :8]) is None
