"""Who takes which of a filter layer's choices, and how many tokens are read for it.

Shapes: B batch, G KV heads, U choices that a filter layer makes, C chosen tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
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
    """How many tokens each choice of the filter layers had so far. Adding waits for no device."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._steps: Counter[int] = Counter()
        self._lock = threading.Lock()

    def add(self, layer: int, chosen: Tensor) -> None:
        """One more step of a filter layer that chose tokens (B, U, C)."""
        counts = (chosen != PAD).sum((0, 2))
        with self._lock:
            self._sums[layer] = self._sums[layer] + counts if layer in self._sums else counts
            self._steps[layer] += chosen.shape[0]

    def mean(self, roles: Mapping[int, Role]) -> float | None:
        """Of a KV head of the layers that are served, by their roles; None before any step."""
        with self._lock:
            means = {layer: (sums / self._steps[layer]).tolist() for layer, sums in self._sums.items()}
        heads = []
        for role in roles.values():
            if role.filter in means:
                taken = role.choices or (0,)
                heads.append(sum(means[role.filter][at] for at in taken) / len(taken))
        return sum(heads) / len(heads) if heads else None
