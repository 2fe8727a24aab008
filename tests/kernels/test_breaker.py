"""A kernel that cannot be built is tried once; the reason is remembered, said once, and the next backend serves."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from kernels import breaker, dispatch
from kernels.attention import cpu, sparse_attention
from kernels.breaker import CannotBuildError, building, failure
from kernels.decode import cpu as decode
from kernels.decode import decode_attention
from kernels.patterns.dense import dense_index


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
    """On the CPU in place of a GPU: the backend that is fastest there fails as a Triton build does."""
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
    assert dispatch.why_not(x, x, x, op)["cpu"] == reason and breaker.failures() == {f"{op}, here": reason}
    with pytest.raises(ValueError, match=f"backend 'cpu' cannot serve this call: {reason}"):
        call("cpu")
    breaker._failed.clear()
    with pytest.raises(ValueError, match=f"backend 'cpu' cannot serve this call: {reason}"):
        call("cpu")
    assert len(tried) == 2


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no memory"), RuntimeError("Triton Error [CUDA]: an illegal memory access"), MemoryError()],
)
def test_what_a_device_reports_is_no_build_that_failed(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, building("here"):
        raise error
    assert not isinstance(raised.value, CannotBuildError) and failure("here") is None
