"""Which backend serves a call, and why not the others."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

from torch import Tensor

# Fastest first. Each is a module of kernels.attention and of kernels.decode, with supports(q, k, v) -> str | None and
# the op itself. `op` says which of the two is meant.
BACKENDS = ("triton", "cpu", "reference")
# A backend made for another device is no loss that a user need hear of.
_MADE_FOR = {"triton": "cuda", "cpu": "cpu"}

_log = logging.getLogger("headwise")


@functools.cache
def backend(name: str, op: str = "attention") -> ModuleType:
    """The backend's module, imported on first use; ValueError names the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return importlib.import_module(f"kernels.{op}.{name}")


def why_not(q: Tensor, k: Tensor, v: Tensor, op: str = "attention") -> dict[str, str | None]:
    """For each backend the reason why it cannot serve the call, None where it can."""
    return {name: backend(name, op).supports(q, k, v) for name in BACKENDS}


def choose(name: str, q: Tensor, k: Tensor, v: Tensor, op: str = "attention") -> ModuleType:
    """The module that serves the call: the one asked for, or for "auto" the fastest that can."""
    if name != "auto":
        module = backend(name, op)
        if reason := module.supports(q, k, v):
            raise ValueError(f"backend {name!r} cannot serve this call: {reason}")
        return module
    for candidate in BACKENDS:
        module = backend(candidate, op)
        reason = module.supports(q, k, v)
        if reason is None:
            return module
        if _MADE_FOR[candidate] == q.device.type:
            _say_once(candidate, reason)
    raise AssertionError("the reference serves every call")


@functools.cache
def _say_once(name: str, reason: str) -> None:
    _log.warning("backend %r not used: %s", name, reason)
