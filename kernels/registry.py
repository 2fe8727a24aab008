"""Registry of backends: op x backend -> module, why one cannot serve a call, and failed builds.

What serves an op is a module or a class with `supports(call)`, the reason why it cannot serve the
call or None, and `run(call)`. A call is an object with its arguments, checked when it is made, and
with its `device`. Importing a module must not fail where its library is absent: that is a reason of
`supports`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Backend(NamedTuple):
    """A backend.

    Attributes:
        device: type of the devices that it is made for; None for any device. One made for another
            device is no loss that a user need hear of.
        ops: by op the module that serves it, or "module:Class".
    """

    device: str | None
    ops: dict[str, str]


# Fastest first, the reference last.
BACKENDS = {
    "triton": Backend(
        "cuda",
        {
            "attention": "kernels.attention.triton",
            "decode": "kernels.decode.triton",
            "estimate": "kernels.patterns.triton:Estimate",
            "means": "kernels.patterns.triton:Means",
            "select": "kernels.patterns.triton:Select",
            "top_k": "kernels.patterns.triton:TopK",
        },
    ),
    "cpu": Backend(
        "cpu",
        {
            "attention": "kernels.attention.cpu",
            "decode": "kernels.decode.cpu",
            "estimate": "kernels.patterns.cpu:Estimate",
            "means": "kernels.patterns.cpu:Means",
            "select": "kernels.patterns.cpu:Select",
            "top_k": "kernels.patterns.cpu:TopK",
            "evict": "kernels.decode.dropping:Native",
        },
    ),
    # torch's own kernels.
    "flash": Backend(None, {"gradient": "kernels.gradient.flash"}),
    "reference": Backend(
        None,
        {
            "attention": "kernels.reference:Attention",
            "decode": "kernels.reference:Decode",
            "gradient": "kernels.reference:Gradient",
            "estimate": "kernels.reference:Estimate",
            "means": "kernels.patterns.block_sparse:ReferenceMeans",
            "select": "kernels.patterns.base:ReferenceSelect",
            "top_k": "kernels.topk:Reference",
            "evict": "kernels.decode.dropping:Reference",
        },
    ),
}
# Of these the reference is fast enough on any device: only a failed build is reported.
_QUIET = ("estimate", "means", "select", "top_k", "evict")
# Of these it takes minutes where a kernel takes milliseconds: it serves only by its name.
_SLOW = ("attention", "decode")

_log = logging.getLogger("headwise")
_failed: dict[tuple[object, ...], str] = {}


class CannotBuildError(RuntimeError):
    """A kernel that cannot be compiled or does not fit the device; another has to serve."""


class NoKernelError(ValueError):
    """No backend, or not the named one, can serve a call; the message has the reasons."""


@functools.cache
def implementation(op: str, name: str) -> Any:
    """Module or class of an op and a backend, imported on first use; ValueError if unknown."""
    names = [each for each, backend in BACKENDS.items() if op in backend.ops]
    if name not in names:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(names)}")
    module, _, member = BACKENDS[name].ops[op].partition(":")
    served = importlib.import_module(module)
    if member:
        return getattr(served, member)
    return served


@functools.cache
def order(op: str, device: str) -> tuple[str, ...]:
    """The backends of an op, first those made for this type of device, the reference last."""
    names = [name for name, backend in BACKENDS.items() if op in backend.ops]
    ranks = {device: 0, None: 2}
    return tuple(sorted(names, key=lambda name: ranks.get(BACKENDS[name].device, 1)))


def why_not(op: str, call: Any) -> dict[str, str | None]:
    """For each backend of an op the reason why it cannot serve a call, None where it can."""
    return {
        name: implementation(op, name).supports(call)
        for name, backend in BACKENDS.items()
        if op in backend.ops
    }


def fast(op: str, call: Any) -> tuple[str, str | None]:
    """The backend that "auto" takes for a call, and None; ("", why) where only the reference can.

    Args:
        op: its name.
        call: the call, or kernels.call.Operands before there is one.
    """
    reasons = {}
    for name in order(op, call.device.type):
        reason = implementation(op, name).supports(call)
        if reason is None and name != "reference":
            return name, None
        reasons[name] = reason
    return "", _no_kernel(reasons)


def _no_kernel(reasons: Mapping[str, str | None]) -> str:
    lines = [f"{name}: {reasons[name]}" for name in BACKENDS if reasons.get(name) is not None]
    return "no fast kernel: " + "; ".join(lines)


def run(op: str, call: Any, backend: str = "auto") -> Any:
    """The result of an op.

    Args:
        op: its name.
        call: its arguments.
        backend: "auto" takes the fastest that serves the call, and reports once why faster ones do
            not: see serve; a name takes that one or raises.

    Raises:
        ValueError: the named backend is unknown.
        NoKernelError: it cannot serve the call; with "auto" none can.
    """
    if backend == "auto":
        return serve(op, call)[1]
    reason = implementation(op, backend).supports(call)
    if reason is not None:
        raise _refusal(backend, reason)
    return run_by(op, backend, call)


def run_by(op: str, backend: str, call: Any) -> Any:
    """The result of an op by a backend that is known to support the call.

    Raises:
        NoKernelError: its kernel cannot be built.
    """
    try:
        return implementation(op, backend).run(call)
    except CannotBuildError as error:
        raise _refusal(backend, error) from error


def serve(
    op: str, call: Any, report: Callable[[str, str], object] | None = None
) -> tuple[str, Any]:
    """The backend that serves a call, the fastest that can, and the result.

    The reference is one of them for operations in which it is fast enough; attention and decode by
    it are for whoever asks for it by its name.

    Args:
        op: its name.
        call: its arguments.
        report: called with each faster backend and the reason why it does not serve; None logs
            a loss once.

    Raises:
        NoKernelError: none can.
    """
    device = call.device.type
    reasons = {}
    for name in order(op, device):
        if name == "reference" and op in _SLOW:
            continue
        served = implementation(op, name)
        reason = served.supports(call)
        if reason is None:
            try:
                return name, served.run(call)
            except CannotBuildError as error:
                # It may build for other calls: only `supports` declines all of them.
                reason = str(error)
        reasons[name] = reason
        if report is not None:
            report(name, reason)
        elif BACKENDS[name].device in (None, device) and (
            op not in _QUIET or reason in _failed.values()
        ):
            log_once(name, reason)
    raise NoKernelError(_no_kernel(reasons))


def _refusal(backend: str, reason: object) -> NoKernelError:
    return NoKernelError(f"backend {backend!r} cannot serve this call: {reason}")


@functools.cache
def log_once(backend: str, reason: str) -> None:
    """Log one line, once for each backend and reason."""
    _log.warning("backend %r not used: %s", backend, reason)


def build_failure(*kernel: object) -> str | None:
    """The reason why a kernel cannot be built; None if it can, or has not been tried."""
    return _failed.get(kernel)


def has_failures() -> bool:
    """True if there is a kernel that cannot be built."""
    return bool(_failed)


def check_built(*kernel: object) -> None:
    """Raise CannotBuildError if the kernel is known to fail."""
    if (reason := build_failure(*kernel)) is not None:
        raise CannotBuildError(reason)


@contextmanager
def build_guard(*kernel: object) -> Iterator[None]:
    """Guard a launch: a failure of its build is remembered for these names.

    Raises:
        CannotBuildError: the build failed. Errors of a running device (no memory left, an illegal
            address) are not the build's and pass through.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = lines or ["no message"]
        # The driver's error of a running kernel.
        if lines[0].startswith("Triton Error ["):
            raise
        _failed[kernel] = f"its kernel failed to build: {type(error).__name__}: {lines[0]}"
        raise CannotBuildError(_failed[kernel]) from error
