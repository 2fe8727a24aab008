"""Launches of Triton's kernels that calls make on a GPU, recorded on the CPU and not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from kernels import dispatch, triton_calls
from kernels.attention import triton as attention
from kernels.attention import triton_launch
from kernels.decode import triton as decode
from kernels.patterns import triton as builders
from kernels.triton_calls import KernelCall


@contextmanager
def recorded(target: str = "interpreter") -> Iterator[list[KernelCall]]:
    """Calls meanwhile are served as on a GPU of this architecture; their results are not made."""
    calls = []
    with ExitStack() as stack:
        for module in (triton_launch, attention, decode, builders):
            stack.enter_context(mock.patch.object(module, "architecture", lambda device: target))
        stack.enter_context(mock.patch.object(triton_launch, "_INTERPRETED", True))
        stack.enter_context(mock.patch.object(triton_calls, "_run", calls.append))
        on_gpu = mock.patch.object(dispatch, "_by_device", lambda kind: dispatch.BACKENDS)
        stack.enter_context(on_gpu)
        stack.enter_context(mock.patch("kernels.patterns.cpu.serves", return_value=False))
        yield calls
