"""Whose choice each KV head takes: the best-fitting one of its layer's filter layer (Kascade, arXiv 2512.16391).

Inside a pair of layers KV heads do not depend on each other, so the best choice for each makes the cheapest pair, and
the exact search over pairs of layers finds layers and heads together.

Shapes: L layers, G KV heads, U sets of a layer's KV heads that can choose, all of them last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from search.decode.filter_layers import Choice, served

# What may choose: all heads of a layer together, each by itself as well, or several together, too.
KINDS = ("pooled", "head", "group")


def allowed(choosers: Sequence[tuple[int, ...]], kind: str) -> list[int]:
    """Which of the sets of KV heads a kind of map may take."""
    last = len(choosers) - 1
    most = {"pooled": 0, "head": 1, "group": len(choosers[-1])}[kind]
    return [at for at, heads in enumerate(choosers) if at == last or len(heads) <= most]


def pair_costs(cost: np.ndarray, may: Sequence[int]) -> np.ndarray:
    """What each pair of layers costs, (L, L), where every KV head takes the best of the sets that it may.

    cost: (L, U, L, G), NaN where not measured.
    """
    summed: np.ndarray = cost[:, list(may)].min(axis=1).sum(axis=-1)
    return summed


def with_heads(choice: Choice, cost: np.ndarray, layers: Sequence[int], may: Sequence[int]) -> Choice:
    """The choice with the set that is best for each KV head; as it is where only all heads together may choose."""
    if list(may) == [cost.shape[1] - 1]:
        return choice
    takes = np.full((cost.shape[2], cost.shape[3]), cost.shape[1] - 1)
    for layer, filter_layer in served(layers, choice).items():
        takes[layer] = np.array(may)[cost[filter_layer, list(may), layer].argmin(axis=0)]
    return replace(choice, takes=tuple(map(tuple, takes.tolist())))


def of_heads(values: np.ndarray, choice: Choice) -> np.ndarray:
    """Of each KV head the value with the set that it takes: (L, L, G) from (L, U, L, G)."""
    if choice.takes is None:
        found: np.ndarray = values[:, -1]
        return found
    takes = np.array(choice.takes)
    return np.take_along_axis(values, takes[None, None], axis=1)[:, 0]


def head_map(
    choice: Choice, choosers: Sequence[tuple[int, ...]], layers: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...] | None, ...] | None:
    """The map as the artifact has it: for each layer that is served the KV heads that choose for each of its own."""
    if choice.takes is None:
        return None
    here = served(layers, choice)
    return tuple(tuple(choosers[at] for at in row) if layer in here else None for layer, row in enumerate(choice.takes))
