"""What each layer does in decode: it filters, is served by a filter layer, or attends to everything; and what is read.

Shapes: B batch, G KV heads, U choices that a filter layer makes, C chosen tokens.
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
    """What a full-attention layer does in decode; one that neither filters nor has a filter attends to everything.

    choosers: of a filter layer, for each choice that it makes the KV heads of this process that make it; None: it makes
    one, by all of its heads. choices: of a layer that is served, for each of its KV heads in this process which of its
    filter layer's choices it takes; None: the only one.
    """

    filters: bool = False
    filter: int | None = None
    choosers: tuple[tuple[int, ...], ...] | None = None
    choices: tuple[int, ...] | None = None

    def taken(self, tokens: Tensor) -> Tensor:
        """What a layer's KV heads take of the choices (B, U, C): (B, G, C), or (B, C) for all of them."""
        if self.choices is None:
            return tokens[:, 0]
        # Stacked, not indexed: a list of indices would be copied to the device.
        return torch.stack([tokens[:, at] for at in self.choices], dim=1)


def roles_of(section: artifacts.OmniKV, layers: Iterable[int], kv_heads: slice) -> dict[int, Role]:
    """The roles of full-attention layers of which this process has these KV heads."""
    roles, layers = {}, list(layers)
    for layer in layers:
        chooser = section.filter_of(layer)
        made = _choices(section, layer if chooser is None else chooser)
        if not made or section.head_map is None:
            roles[layer] = Role(filters=layer in section.filter_layers, filter=chooser)
        elif chooser is None:
            here = range(kv_heads.start, kv_heads.stop)
            choosers = [tuple(head - here.start for head in heads if head in here) for heads in made]
            # The last choice is that of all heads together, where a layer wants it.
            if any(section.head_map[at] is None for at in layers if section.filter_of(at) == layer):
                choosers.append(tuple(range(len(here))))
            roles[layer] = Role(filters=True, choosers=tuple(choosers))
        else:
            row = section.head_map[layer]
            taken = [-1] * (kv_heads.stop - kv_heads.start) if row is None else map(made.index, row[kv_heads])
            roles[layer] = Role(filter=chooser, choices=tuple(taken))
    return roles


def _choices(section: artifacts.OmniKV, chooser: int) -> list[tuple[int, ...]]:
    """The KV heads that make each choice which the head map asks a filter layer for."""
    rows = [row for layer, row in enumerate(section.head_map or ()) if row and section.filter_of(layer) == chooser]
    return list(dict.fromkeys(heads for row in rows for heads in row))


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
