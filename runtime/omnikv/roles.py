"""What each layer does in decode: it filters, is served by a filter layer, or attends to everything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import artifacts


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
