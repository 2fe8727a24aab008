"""Choice of the backend that serves a call, with the reasons why the others do not."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels.breaker import CannotBuildError

# Fastest first. Each is a module of kernels.attention and of kernels.decode, as kernels.backend
# declares them. `op` says which of them is meant.
BACKENDS = ("triton", "cpu", "reference")
# A backend made for another device is no loss that a user need hear of.
_MADE_FOR = {"triton": "cuda", "cpu": "cpu"}

_log = logging.getLogger("headwise")
_Result = TypeVar("_Result")


@functools.cache
def backend(name: str, op: str = "attention") -> ModuleType:
    """The backend's module, imported on first use; ValueError names the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return importlib.import_module(f".{op}.{name}", __package__)


@functools.cache
def _by_device(kind: str) -> tuple[str, ...]:
    """The backends, first the one made for this device: as a rule no other is asked."""
    return tuple(sorted(BACKENDS, key=lambda name: name == "reference" or _MADE_FOR[name] != kind))


def why_not(q: Tensor, k: Tensor, v: Tensor, op: str = "attention") -> dict[str, str | None]:
    """For each backend the reason why it cannot serve the call, None where it can."""
    return {name: backend(name, op).supports(q, k, v) for name in BACKENDS}


def fastest(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The backend that "auto" takes for a call of attention; "reference" if no other serves it."""
    return next(
        name for name in _by_device(q.device.type) if backend(name).supports(q, k, v) is None
    )


def why_slow(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The reason why only the reference can serve a call of attention; None if another can."""
    if backend(_by_device(q.device.type)[0]).supports(q, k, v) is None:
        return None
    fast = {name: reason for name, reason in why_not(q, k, v).items() if name != "reference"}
    if None in fast.values():
        return None
    return "no fast kernel: " + "; ".join(f"{name}: {reason}" for name, reason in fast.items())


def derivative_wanted(*tensors: Tensor) -> str | None:
    """The reason why native code and Triton cannot serve: a derivative; None if none is wanted."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "it has no backward pass (use torch.no_grad or torch.inference_mode)"
    # Only where a level is open can a tensor have a tangent.
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        return "it has no forward-mode derivative"
    return None


def choose(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    op: str = "attention",
    *,
    sinks: Tensor | None = None,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> ModuleType:
    """The module that serves the call: the one asked for, or for "auto" the fastest that can.

    Args:
        failed: backends that have tried this call in vain, and why.
    """

    def reason_of(name: str, module: ModuleType) -> str | None:
        reason: str | None = module.supports(q, k, v)
        if reason is None and sinks is not None and name != "reference":
            reason = derivative_wanted(sinks)
        return reason

    if name != "auto":
        module = backend(name, op)
        if reason := reason_of(name, module):
            raise ValueError(f"backend {name!r} cannot serve this call: {reason}")
        return module
    for candidate in _by_device(q.device.type):
        module = backend(candidate, op)
        reason = failed.get(candidate) or reason_of(candidate, module)
        if reason is None:
            return module
        if _MADE_FOR[candidate] == q.device.type:
            say_once(candidate, reason)
    raise AssertionError("the reference serves every call")


def serve(
    name: str,
    call: Callable[[Any], _Result],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    op: str = "attention",
    *,
    sinks: Tensor | None = None,
) -> _Result:
    """Result of `call` with the chosen module, or with the next where that does not build.

    Raises:
        ValueError: the backend asked for by name cannot serve the call.
    """
    failed: dict[str, str] = {}
    while True:
        module = choose(name, q, k, v, op, sinks=sinks, failed=failed)
        try:
            return call(module)
        except CannotBuildError as error:
            # What builds for other calls is asked for them again: only `supports` declines all.
            if name != "auto":
                raise ValueError(f"backend {name!r} cannot serve this call: {error}") from error
            failed[module.__name__.rpartition(".")[2]] = str(error)


@functools.cache
def say_once(name: str, reason: str) -> None:
    """One line in the log, however often the same is the case."""
    _log.warning("backend %r not used: %s", name, reason)
