"""Choice of filter layers and dense layers by exact dynamic programming (OmniKV, section 4.1).

cost[i, j] is the cost of layer j seeing only the tokens that layer i ranks highest. A sparse
layer is served by the nearest filter layer before it, and costs add up. So of the layers between
two filters those that stay dense are the costliest, and the best choice of m filters whose last is
i depends only on the best of m - 1 filters before i.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated

import numpy as np
from pydantic import Field

from artifacts import HeadwiseError
from artifacts.cli.options import ADVANCED, BETWEEN_0_AND_1, Arg, CommandConfig


@dataclass(frozen=True)
class Choice:
    """Filter layers, and full-attention layers that stay dense."""

    filter_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]

    @property
    def full(self) -> int:
        """Number of layers that attend to everything."""
        return len(self.filter_layers) + len(self.dense_layers)


class Rules(CommandConfig):
    """Rules of a choice.

    Attributes:
        sparse: least fraction of full-attention layers that are sparse.
        filters: the most filter layers.
        dense_first: the fewest full-attention layers before the first filter.
    """

    filters: Annotated[int, Arg("most filter layers", group=ADVANCED), Field(ge=1)] = 6
    sparse: Annotated[
        float, Arg("least fraction of sparse layers", group=ADVANCED), BETWEEN_0_AND_1
    ] = 0.6
    dense_first: Annotated[int, Arg("first layers that are dense", group=ADVANCED), Field(ge=0)] = 0

    def full(self, layers: int) -> int:
        """Number of full-attention layers that may attend to everything, of `layers`."""
        return layers - ceil(self.sparse * layers - 1e-9)


def served(layers: Sequence[int], choice: Choice) -> dict[int, int]:
    """The filter layer of each layer that does not attend to everything."""
    dense = {*choice.filter_layers, *choice.dense_layers}
    return {j: max(f for f in choice.filter_layers if f < j) for j in layers if j not in dense}


def total(cost: np.ndarray, layers: Sequence[int], choice: Choice) -> float:
    """The cost of a choice: nothing in layers that attend to everything."""
    return float(
        sum(cost[filter_layer, layer] for layer, filter_layer in served(layers, choice).items())
    )


def kept(mass: np.ndarray, layers: Sequence[int], choice: Choice) -> float:
    """The mean mass kept over all full-attention layers.

    Args:
        mass: (L, L).
        layers: the full-attention layers, ascending.
        choice: the filter layers and what each serves.
    """
    return 1 - total(1 - mass, layers, choice) / len(layers)


def best_choice(cost: np.ndarray, layers: Sequence[int], rules: Rules) -> Choice:
    """The choice of least cost; of equal ones that with the fewest full layers.

    Args:
        cost: (L, L); only rows and columns of `layers` are read, above the diagonal.
        layers: the full-attention layers, ascending.
        rules: constraints on the choice.

    Raises:
        HeadwiseError: the rules leave no layer to filter or to be sparse.
    """
    return min(_by_full(cost, layers, rules), key=lambda choice: total(cost, layers, choice))


def evenly_spaced(layers: Sequence[int], count: int, dense: Collection[int]) -> Choice:
    """The baseline: `count` filter layers at even distances among those that are not dense."""
    free = [layer for layer in layers if layer not in dense]
    filters = tuple(free[round(i * len(free) / count)] for i in range(count))
    return Choice(filters, tuple(sorted(dense)))


def _by_full(cost: np.ndarray, layers: Sequence[int], rules: Rules) -> list[Choice]:
    """The choice of least cost for each number of full layers, the fewest first."""
    n = len(layers)
    full = rules.full(len(layers))
    if full >= n or full < rules.dense_first + 1:
        raise HeadwiseError(
            f"--dense-first {rules.dense_first} with --sparse {rules.sparse:g} leaves no filter "
            f"layer and no sparse layer among {n} full-attention layers"
        )
    pairs = np.ix_(layers, layers)
    if np.isnan(cost[pairs][np.triu_indices(n, 1)]).any():
        raise HeadwiseError(
            "the similarity profile lacks values of full-attention layers: measure it again"
        )
    run = _runs(cost[pairs], full)
    # best[a, u]: the cost from filter a on, with u layers behind it that attend to everything: so
    # far with no further filter, then with one more at most in each turn. after: that filter, and
    # how many layers up to it are dense.
    best = run[:, :, n].T
    after: list[dict[tuple[int, int], tuple[int, int]]] = []
    for _ in range(1, min(rules.filters, full)):
        more = run[:, :, n].T.copy()
        origin = {}
        for a, u in np.ndindex(n, full):
            ways = run[:u, a, :n] + best[:, :u][:, ::-1].T
            if u and ways.min() < more[a, u]:
                d, b = divmod(int(ways.argmin()), n)
                more[a, u] = ways[d, b]
                origin[a, u] = (b, d)
        best = more
        after.append(origin)
    choices: list[Choice] = []
    for count in range(rules.dense_first + 1, full + 1):
        first = min(range(rules.dense_first, count), key=lambda a: best[a, count - 1 - a])
        if np.isfinite(best[first, count - 1 - first]):
            choices.append(_traced(cost[pairs], layers, after, first, count - 1 - first))
    return choices


def _runs(cost: np.ndarray, full: int) -> np.ndarray:
    """[d, a, b]: cost of the layers between filters a and b, if the best d of them are dense."""
    n = len(cost)
    runs = np.full((full, n, n + 1), np.inf)
    for a in range(n):
        for b in range(a + 1, n + 1):
            served = np.sort(cost[a, a + 1 : b])
            sums = np.concatenate([[0.0], np.cumsum(served)])[::-1]
            width = min(len(sums), full)
            runs[:width, a, b] = sums[:width]
    return runs


def _traced(
    cost: np.ndarray,
    layers: Sequence[int],
    after: Sequence[dict[tuple[int, int], tuple[int, int]]],
    first: int,
    behind: int,
) -> Choice:
    """The choice whose first filter is number `first`, with `behind` full layers after it."""
    a = first
    u = behind
    filters = [first]
    dense = list(range(first))
    # Of the turns the last one knows of the most filters.
    for origin in [*reversed(after), {}]:
        end, d = origin.get((a, u), (len(layers), u))
        served = sorted(range(a + 1, end), key=lambda j: -cost[filters[-1], j])
        dense += served[:d]
        if end == len(layers):
            break
        filters.append(end)
        a = end
        u = u - 1 - d
    return Choice(tuple(layers[p] for p in filters), tuple(layers[p] for p in sorted(dense)))
