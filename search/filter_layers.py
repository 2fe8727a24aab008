"""Which layers filter in decode: exact dynamic programming over a similarity profile (OmniKV, section 4.1).

S[i, j] is the attention mass in layer j on the tokens that layer i ranks highest. The first filter layer comes right
after the shallow layers that stay dense, and a sparse layer is served by the nearest filter layer before it. So a
choice keeps the sum of S over its runs, and the best choice of m filters whose last is i depends only on the best
choice of m - 1 filters before i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import HeadwiseError


@dataclass(frozen=True)
class Choice:
    """Filter layers, layers that stay dense beside them, and the mean mass kept over all full-attention layers."""

    filter_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    kept: float


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a choice must hold to.

    dense_first: the first so many full-attention layers are dense, since they attend to everything alike; the next one
        is the first filter. Later, it would leave more layers dense: all mass kept, and nothing saved.
    most: at most so many filter layers, the first included.
    adjacent: the layer after each filter is dense too, so that an offloaded fetch has something to hide behind.
    """

    dense_first: int = 2
    most: int = 3
    adjacent: bool = False


def best_filters(mass: np.ndarray, layers: Sequence[int], rules: Rules) -> Choice:
    """The filter layers that keep the most mass; of equal ones the fewest, then the first.

    Args:
        mass: (L, L), S[i, j]; only rows and columns of `layers` are read, above the diagonal.
        layers: the full-attention layers, ascending.
        rules: what the choice must hold to.

    Raises:
        HeadwiseError: no layer is left to filter or to be sparse.
    """
    return max(_by_count(mass, layers, rules), key=lambda choice: (choice.kept, -len(choice.filter_layers)))


def fewest_filters(mass: np.ndarray, layers: Sequence[int], rules: Rules, floor: float) -> Choice:
    """The fewest filter layers that keep at least `floor`: the least memory and latency, since each attends to all.

    Raises:
        HeadwiseError: none keep so much; the line says what is the most.
    """
    choices = _by_count(mass, layers, rules)
    for choice in choices:
        if choice.kept >= floor:
            return choice
    most = max(choices, key=lambda choice: choice.kept)
    raise HeadwiseError(
        f"no {rules.most} filter layers keep {floor:.3f} of the attention mass: the most is {most.kept:.3f} with "
        f"{', '.join(map(str, most.filter_layers))}; allow more filter layers, a larger budget or a lower floor"
    )


def evenly_spaced(mass: np.ndarray, layers: Sequence[int], rules: Rules, count: int) -> Choice:
    """`count` filter layers at even distances from the first one on: the choice by eye to compare with."""
    room = len(layers) - rules.dense_first
    at = [rules.dense_first + round(i * room / count) for i in range(count)]
    return chosen(mass, layers, rules, [layers[i] for i in at])


def random_choices(
    mass: np.ndarray, layers: Sequence[int], rules: Rules, count: int, *, samples: int, seed: int
) -> list[Choice]:
    """`samples` choices of the first filter layer and `count` - 1 others behind it, drawn alike."""
    generator = np.random.default_rng(seed)
    first, *others = layers[rules.dense_first :]
    drawn = [sorted(generator.choice(others, size=count - 1, replace=False).tolist()) for _ in range(samples)]
    return [chosen(mass, layers, rules, [first, *filters]) for filters in drawn]


def chosen(mass: np.ndarray, layers: Sequence[int], rules: Rules, filters: Sequence[int]) -> Choice:
    """The choice of exactly these filter layers.

    Raises:
        HeadwiseError: one of them is no full-attention layer, is among the dense first ones, or is named twice.
    """
    layers = list(layers)
    for layer in filters:
        if layer not in layers:
            raise HeadwiseError(f"filter layer {layer} is no full-attention layer: those are {_listed(layers)}")
    if len(set(filters)) < len(filters) or not filters:
        raise HeadwiseError(f"filter layers must be different layers, at least one, got {_listed(filters)}")
    places = sorted(layers.index(layer) for layer in filters)
    ends = [*places[1:], len(layers)]
    kept = places[0] + sum(_run(mass, layers, rules, a, b) for a, b in zip(places, ends, strict=True))
    dense = layers[: places[0]]
    if rules.adjacent:
        dense += [layers[a + 1] for a, b in zip(places, ends, strict=True) if a + 1 < b]
    return Choice(tuple(layers[i] for i in places), tuple(sorted(dense)), kept / len(layers))


def _run(mass: np.ndarray, layers: Sequence[int], rules: Rules, filter_at: int, end: int) -> float:
    """Mass kept by a filter and the layers it serves, up to the one before `end` (places in `layers`)."""
    served = range(filter_at + 1, end)
    first = 1 if rules.adjacent else 0
    spared = min(first, len(served))
    return 1 + spared + float(sum(mass[layers[filter_at], layers[j]] for j in served[spared:]))


def _by_count(mass: np.ndarray, layers: Sequence[int], rules: Rules) -> list[Choice]:
    """The best choice of exactly 1, 2, ... filters."""
    n, first = len(layers), rules.dense_first
    if rules.most < 1 or first + 1 >= n:
        raise HeadwiseError(
            f"{n} full-attention layers leave none to be sparse behind {first} dense ones and a filter layer"
        )
    if np.isnan(mass[np.ix_(layers, layers)][np.triu_indices(n, 1)]).any():
        raise HeadwiseError("the similarity profile lacks values of full-attention layers: measure it again")
    run = [[_run(mass, layers, rules, a, b) for b in range(n + 1)] for a in range(n)]
    # best[c][a]: mass kept by the layers before place a, which is filter number c + 1.
    best = [[float(a) if a == first else -np.inf for a in range(n)]]
    before: list[list[int]] = [[-1] * n]
    for _ in range(1, min(rules.most, n - first)):
        former = best[-1]
        options = [[former[f] + run[f][a] for f in range(a)] or [-np.inf] for a in range(n)]
        before.append([int(np.argmax(o)) for o in options])
        best.append([max(o) for o in options])
    choices = []
    for count, row in enumerate(best):
        at = int(np.argmax([row[a] + run[a][n] for a in range(n)]))
        if row[at] == -np.inf:
            continue
        places = [at]
        for c in range(count, 0, -1):
            places.append(before[c][places[-1]])
        choices.append(chosen(mass, layers, rules, [layers[p] for p in places]))
    return choices


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"
