"""A kernel that cannot be built is tried once and remembered; another kernel serves, or none."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch

from kernels import registry, triton_calls
from kernels.attention import sparse_attention, triton
from kernels.call import Operands
from kernels.decode import cpu as decode
from kernels.decode import decode_attention
from kernels.decode import triton as decode_triton
from kernels.patterns.dense import dense_index
from kernels.registry import CannotBuildError, NoKernelError, build_failure, build_guard
from tests.kernels.recording import recorded


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(registry, "_failed", {})
    monkeypatch.setattr(registry, "log_once", cache(registry.log_once.__wrapped__))


def test_failed_build_is_tried_once(monkeypatch, caplog):
    """Use a CPU in place of a GPU: its fastest backend fails like a Triton build."""
    tried = []

    def fails(call):
        tried.append(1)
        with build_guard("decode", "here"):
            raise RuntimeError("PassManager::run failed\nat line 3")

    monkeypatch.setattr(decode, "run", fails)
    monkeypatch.setattr(decode, "supports", lambda call: build_failure("decode", "here"))
    x = torch.randn(1, 2, 5, 16)
    reason = "its kernel failed to build: RuntimeError: PassManager::run failed"
    with caplog.at_level(logging.WARNING, "headwise"):
        for _ in range(3):
            with pytest.raises(NoKernelError, match=f"^no fast kernel: triton: .*; cpu: {reason}"):
                decode_attention(x, x, x)
    assert len(tried) == 1
    assert caplog.messages == [f"backend 'cpu' not used: {reason}"]
    assert registry.why_not("decode", Operands(x, x, x))["cpu"] == reason
    assert registry._failed == {("decode", "here"): reason}
    for is_recorded in (True, False):
        if not is_recorded:
            registry._failed.clear()
        with pytest.raises(ValueError, match=f"backend 'cpu' cannot serve this call: {reason}"):
            decode_attention(x, x, x, backend="cpu")
    assert len(tried) == 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), RuntimeError("Triton Error [CUDA]: illegal memory access")]
)
def test_device_error_is_not_a_build_failure(error):
    with pytest.raises(type(error)) as raised, build_guard("here"):
        raise error
    assert not isinstance(raised.value, CannotBuildError) and build_failure("here") is None


@pytest.fixture
def builds():
    """builds(fails) -> attempted attention kernels. Triton runs on the CPU and launches do nothing;
    a build fails if `fails` returns True for its constants."""
    with recorded(), pytest.MonkeyPatch.context() as patch:

        def builds(fails):
            tried = []

            def run(call):
                if how := call.constants.get("H"):
                    tried.append(how)
                if fails(call.constants):
                    raise RuntimeError("out of resource: shared memory")

            patch.setattr(triton_calls, "_run", run)
            return tried

        yield builds


def attend(**how: Any) -> torch.Tensor:
    x = torch.randn(1, 2, 70, 16, generator=torch.Generator().manual_seed(0))
    return sparse_attention(
        *(x, x, x), dense_index(1, 2, 70, 70, x.device, window=how.pop("window", None)), **how
    )


def test_failed_variant_leaves_other_variants_usable(builds):
    tried = builds(lambda constants: "H" in constants and constants["H"].window)
    for _ in range(2):
        # Another backend serves these, each time; and Triton the others, which nobody computes
        # here.
        torch.testing.assert_close(attend(window=5), attend(window=5, backend="reference"))
        attend()
    assert [how.window for how in tried] == [True, False, False]
    x = torch.ones(1, 2, 70, 16)
    assert triton.supports(Operands(x, x, x)) is None
    with pytest.raises(
        ValueError, match="backend 'triton' cannot serve this call: its kernel failed to build"
    ):
        attend(window=5, backend="triton")


def test_decode_failing_with_scores_still_runs_without_scores(builds):
    builds(lambda constants: bool(constants.get("KEEP")))
    x = torch.randn(1, 2, 70, 16)
    found, expected = (
        decode_attention(x[:, :, -1:], x, x, scores="sum", backend=name) for name in ("auto", "cpu")
    )
    torch.testing.assert_close(found.out, expected.out)
    assert decode_triton.supports(Operands(x, x, x)) is None


def test_prompt_sums_that_do_not_build_use_another_backend(builds):
    builds(lambda constants: "QUERIES" in constants)
    x = torch.randn(1, 2, 30, 16)
    for _ in range(2):
        result = decode_attention(x, x, x, scores="sum")
        expected = decode_attention(x, x, x, scores="sum", backend="cpu")
        torch.testing.assert_close(result.scores, expected.scores)
    assert "failed to build" in str(decode_triton.supports(Operands(x, x, x)))
    with pytest.raises(ValueError, match="'triton' cannot serve this call: its kernel failed"):
        decode_attention(x, x, x, scores="sum", backend="triton")


def test_failed_minimal_variant_is_not_retried(builds):
    tried = builds(lambda constants: "H" in constants)
    for window in (None, 5):
        torch.testing.assert_close(
            attend(window=window), attend(window=window, backend="reference")
        )
    x = torch.ones(1, 2, 70, 16)
    assert len(tried) == 1 and "failed to build" in str(triton.supports(Operands(x, x, x)))
    # Of another head dim it may build.
    assert triton.supports(Operands(x[..., :8], x[..., :8], x[..., :8])) is None
