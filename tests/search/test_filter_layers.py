"""The dynamic programme against all choices, and what choices are compared with."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import HeadwiseError
from search.filter_layers import Rules, best_filters, chosen, evenly_spaced, fewest_filters, random_choices


def kept_by_hand(mass: np.ndarray, layers: list[int], filters: tuple[int, ...], adjacent: bool) -> float:
    """By the definition: every sparse layer keeps what the nearest filter before it shares with it."""
    total = 0.0
    for place, layer in enumerate(layers):
        before = [f for f in filters if f < layer]
        spared = adjacent and place > 0 and layers[place - 1] in filters
        dense = layer in filters or not before or spared
        total += 1.0 if dense else float(mass[before[-1], layer])
    return total / len(layers)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 8), st.integers(0, 2), st.integers(1, 4), st.booleans(), st.integers(0, 2**16), st.booleans())
def test_no_choice_is_better(n: int, first: int, most: int, adjacent: bool, seed: int, hybrid: bool) -> None:
    generator = np.random.default_rng(seed)
    layers = list(range(1, 2 * n, 2)) if hybrid else list(range(n))
    mass = generator.random((2 * n, 2 * n))
    if first + 1 >= n:
        first = 0
    rules = Rules(dense_first=first, most=most, adjacent=adjacent)
    best = best_filters(mass, layers, rules)
    every = [
        (kept_by_hand(mass, layers, filters, adjacent), filters)
        for count in range(1, most + 1)
        for filters in combinations(layers[first:], count)
        if filters[0] == layers[first]
    ]
    assert best.kept == pytest.approx(max(every)[0])
    assert best.kept == pytest.approx(kept_by_hand(mass, layers, best.filter_layers, adjacent))
    assert len(best.filter_layers) <= most and not set(best.filter_layers) & set(best.dense_layers)
    floor = generator.random()
    if floor <= best.kept:
        fewest = fewest_filters(mass, layers, rules, floor)
        assert fewest.kept >= floor
        assert not [f for kept, f in every if len(f) < len(fewest.filter_layers) and kept >= floor + 1e-9]
    else:
        with pytest.raises(HeadwiseError, match=f"the most is {best.kept:.3f}"):
            fewest_filters(mass, layers, rules, floor)


def test_dense_layers_are_those_before_the_first_filter_and_beside_each() -> None:
    mass = np.full((8, 8), 0.5)
    plain = chosen(mass, range(8), Rules(), [6, 3])
    assert (plain.filter_layers, plain.dense_layers) == ((3, 6), (0, 1, 2))
    assert plain.kept == pytest.approx((3 + 2 + 3 * 0.5) / 8)
    beside = chosen(mass, range(8), Rules(adjacent=True), [3, 6])
    assert beside.dense_layers == (0, 1, 2, 4, 7) and beside.kept == pytest.approx((3 + 2 + 2 + 0.5) / 8)


def test_what_a_choice_is_compared_with() -> None:
    mass = np.random.default_rng(0).random((30, 30))
    even = evenly_spaced(mass, range(30), Rules(), 3)
    assert even.filter_layers == (2, 11, 21)
    drawn = random_choices(mass, range(30), Rules(), 3, samples=50, seed=1)
    assert len(drawn) == 50 and len({c.filter_layers for c in drawn}) > 40
    assert all(c.dense_layers == even.dense_layers == (0, 1) for c in drawn)
    assert drawn == random_choices(mass, range(30), Rules(), 3, samples=50, seed=1)
    assert all(min(c.filter_layers) == 2 for c in drawn)
    assert best_filters(mass, range(30), Rules()).kept >= max([even.kept, *(c.kept for c in drawn)])


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([4], "filter layer 4 is no full-attention layer: those are 1, 3, 5"),
        ([3, 3], "must be different layers, at least one, got 3, 3"),
        ([], "must be different layers, at least one, got none"),
    ],
)
def test_a_choice_by_hand_is_checked(filters: list[int], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        chosen(np.ones((6, 6)), [1, 3, 5], Rules(), filters)


def test_too_few_layers_and_holes_are_refused() -> None:
    with pytest.raises(HeadwiseError, match="3 full-attention layers leave none to be sparse behind 2 dense ones"):
        best_filters(np.ones((3, 3)), [0, 1, 2], Rules())
    mass = np.ones((4, 4))
    mass[1, 3] = np.nan
    with pytest.raises(HeadwiseError, match="lacks values of full-attention layers"):
        best_filters(mass, [0, 1, 2, 3], Rules())
