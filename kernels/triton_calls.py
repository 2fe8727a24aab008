"""Launches of Triton kernels: what one is made of, and how several run one after the other on a device."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.breaker import building


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One launch: the kernel and the module that has it, its grid, its arguments, those of them that are compiled in,
    and Triton's own options."""

    module: str
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]

    @property
    def function(self) -> Any:
        """The kernel itself; imports triton."""
        return getattr(importlib.import_module(self.module), self.kernel)


def run_calls(calls: Sequence[KernelCall], device: torch.device, *build: object) -> None:
    """Launch them in turn; `build` is what one that fails to build is remembered by (kernels.breaker)."""
    on_its_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_its_device, building(*build):
        for call in calls:
            call.function[call.grid](**call.arguments, **call.constants, **call.options)
