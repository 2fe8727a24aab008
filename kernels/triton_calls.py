"""Launches of Triton kernels, and several run one after the other on a device."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.logits import Logits
from kernels.registry import build_guard, check_built, has_failures

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One launch: module, kernel, grid, arguments, compiled-in constants and Triton's options.

    Attributes:
        plain: whether no call of its op does with less; where it does not build, the op is not
            served.
    """

    module: str
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]
    plain: bool = True

    def build(self, op: tuple[object, ...]) -> tuple[object, ...]:
        """Key of a failed build: its op, and the constants where others do without."""
        if self.plain:
            return op
        return (*op, self.kernel, *self.constants.values(), *self.options.values())

    @property
    def function(self) -> Any:
        """The kernel itself; imports triton."""
        return getattr(importlib.import_module(self.module), self.kernel)


def or_placeholder(x: Tensor | None, placeholder: Tensor) -> Tensor:
    """An optional tensor, contiguous; the placeholder of an absent one is never read."""
    if x is None:
        return placeholder
    return x.contiguous()


def softmax_factors(logits: Logits, head_dim: int) -> dict[str, float]:
    """Scale and soft-cap with log2(e) folded in; soft-capped, scale yields the exponent of e^2x."""
    scale, softcap = logits.numbers(head_dim)
    if not softcap:
        return {"scale": scale * _LOG2E, "softcap": 0.0}
    return {"scale": 2 * scale / softcap * _LOG2E, "softcap": softcap * _LOG2E}


def run_calls(calls: Sequence[KernelCall], device: torch.device, *op: object) -> None:
    """Launch them in order, none where one is known to fail; `op` names their builds.

    Raises:
        CannotBuildError: one cannot be built. The launches before it have to be repeated.
    """
    if has_failures():
        for call in calls:
            check_built(*call.build(op))
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        for call in calls:
            with build_guard(*call.build(op)):
                _run(call)


def _run(call: KernelCall) -> None:
    call.function[call.grid](**call.arguments, **call.constants, **call.options)
