"""What each layer does in decode: it filters, is served by a filter layer, or attends to
everything; and what is read.

Shapes: B batch, C chosen tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import artifacts
from kernels.index import PAD


@dataclass(frozen=True)
class Role:
    """What a full-attention layer does in decode; one that neither filters nor has a filter attends
    to everything."""

    filters: bool = False
    filter: int | None = None


def roles_of(section: artifacts.OmniKV, layers: Iterable[int]) -> dict[int, Role]:
    """The roles of full-attention layers."""
    return {
        layer: Role(layer in section.filter_layers, section.filter_of(layer)) for layer in layers
    }


class Reads:
    """How many tokens each filter layer chose so far. Adding waits for no device, and can be
    replayed."""

    def __init__(self) -> None:
        # (2,) int64 each: chosen tokens, and of how many sequences.
        self._sums: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def add(self, layer: int, chosen: Tensor, counted: Tensor | None = None) -> None:
        """One more step of a filter layer that chose tokens (B, C); of these sequences (B,) bool
        alone, if given."""
        there = chosen != PAD
        if counted is None:
            counted = there.new_ones(len(chosen))
        new = torch.stack([(there & counted[:, None]).sum(), counted.sum()])
        with self._lock:
            if layer not in self._sums:
                # Whoever adds later may or may not be in inference mode.
                with torch.inference_mode(False):
                    self._sums[layer] = torch.zeros(new.shape, dtype=new.dtype, device=new.device)
            self._sums[layer] += new

    def mean(self, roles: Mapping[int, Role]) -> float | None:
        """Of the layers that are served, by their roles; None before any step."""
        with self._lock:
            sums = {layer: both.tolist() for layer, both in self._sums.items()}
        means = {layer: count / steps for layer, (count, steps) in sums.items() if steps}
        read = [means[role.filter] for role in roles.values() if role.filter in means]
        return sum(read) / len(read) if read else None
