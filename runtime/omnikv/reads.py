"""Who takes which of a filter layer's choices, and how many tokens are read for it.

Shapes: B batch, G KV heads, U choices that a filter layer makes, C chosen tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.index import PAD
from runtime.omnikv.roles import Role


def taken(tokens: Tensor, choices: Sequence[int] | None) -> Tensor:
    """What a layer's KV heads take of the choices (B, U, C): (B, G, C), or (B, C) for all of them."""
    # Stacked, not indexed: a list of indices would be copied to the device.
    return tokens[:, 0] if choices is None else torch.stack([tokens[:, at] for at in choices], dim=1)


class Reads:
    """How many tokens each choice of the filter layers had so far. Adding waits for no device, and can be replayed."""

    def __init__(self) -> None:
        # (U + 1,) int64 each: the tokens of each choice, and of how many sequences.
        self._sums: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def add(self, layer: int, chosen: Tensor, counted: Tensor | None = None) -> None:
        """One more step of a filter layer that chose tokens (B, U, C); of these sequences (B,) bool alone, if given."""
        there = chosen != PAD
        if counted is None:
            counted = there.new_ones(len(chosen))
        new = torch.cat([(there & counted[:, None, None]).sum((0, 2)), counted.sum()[None]])
        with self._lock:
            if layer not in self._sums:
                # Whoever adds later may or may not be in inference mode.
                with torch.inference_mode(False):
                    self._sums[layer] = torch.zeros(new.shape, dtype=new.dtype, device=new.device)
            self._sums[layer] += new

    def mean(self, roles: Mapping[int, Role]) -> float | None:
        """Of a KV head of the layers that are served, by their roles; None before any step."""
        with self._lock:
            found = {layer: sums.tolist() for layer, sums in self._sums.items()}
        means = {layer: [count / steps for count in counts] for layer, (*counts, steps) in found.items() if steps}
        heads = []
        for role in roles.values():
            if role.filter in means:
                taken = role.choices or (0,)
                heads.append(sum(means[role.filter][at] for at in taken) / len(taken))
        return sum(heads) / len(heads) if heads else None
