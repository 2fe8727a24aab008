"""Launches of Triton's kernels that calls make on a GPU, recorded on the CPU and not run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from kernels import registry, triton_calls
from kernels.attention import triton as attention
from kernels.attention import triton_launch
from kernels.decode import triton as decode
from kernels.patterns import triton as builders
from kernels.triton_calls import KernelCall

# Ops of what builds an index.
BUILDERS = ("estimate", "means", "select", "top_k")


@contextmanager
def served_by(*backends: str, ops: Collection[str]) -> Iterator[None]:
    """Meanwhile "auto" takes the first of these backends that can, for some ops."""
    former = registry.order

    def order(op: str, device: str) -> tuple[str, ...]:
        if op in ops:
            return tuple(name for name in backends if op in registry.BACKENDS[name].ops)
        return former(op, device)

    with mock.patch.object(registry, "order", order):
        yield


@contextmanager
def recorded(target: str = "interpreter") -> Iterator[list[KernelCall]]:
    """Calls meanwhile are served as on a GPU of this architecture; their results are not made."""
    calls = []
    with ExitStack() as stack:
        for module in (triton_launch, attention, decode, builders):
            stack.enter_context(mock.patch.object(module, "architecture", lambda device: target))
        stack.enter_context(mock.patch.object(triton_launch, "_INTERPRETED", True))
        stack.enter_context(mock.patch.object(triton_calls, "_run", calls.append))
        stack.enter_context(served_by("triton", "cpu", "reference", ops=("attention", "decode")))
        stack.enter_context(served_by("triton", "reference", ops=BUILDERS))
        yield calls
