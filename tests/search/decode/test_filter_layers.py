"""The dynamic programme against all choices, and what choices are compared with."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import HeadwiseError
from search.decode.filter_layers import (
    Choice,
    Rules,
    best_choice,
    by_hand,
    cheapest,
    evenly_spaced,
    kept,
    random_choices,
    total,
)


def every_choice(layers: list[int], rules: Rules) -> list[Choice]:
    """By the definition: all sets of filter and dense layers that hold to the rules."""
    found = []
    for full in range(1, rules.full(len(layers)) + 1):
        for chosen in combinations(layers, full):
            for count in range(1, min(rules.filters, full) + 1):
                for filters in combinations(chosen, count):
                    choice = Choice(filters, tuple(layer for layer in chosen if layer not in filters))
                    first = [layer for layer in layers if layer < filters[0]]
                    beside = [b for a, b in pairwise(layers) if a in filters]
                    if len(first) < rules.dense_first or not set(first) <= set(choice.dense_layers):
                        continue
                    if not rules.adjacent or set(beside) <= set(chosen):
                        found.append(choice)
    return found


def cost_by_hand(cost: np.ndarray, layers: list[int], choice: Choice) -> float:
    """Every sparse layer costs what the nearest filter before it leaves out."""
    summed, latest = 0.0, -1
    for layer in layers:
        if layer in choice.filter_layers:
            latest = layer
        elif layer not in choice.dense_layers:
            summed += float(cost[latest, layer])
    return summed


@settings(max_examples=60, deadline=None)
@given(
    st.integers(3, 7),
    st.integers(0, 2),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.2, 0.4, 0.6]),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_no_choice_costs_less(
    n: int, first: int, most: int, adjacent: bool, sparse: float, seed: int, hybrid: bool
) -> None:
    generator = np.random.default_rng(seed)
    layers = list(range(1, 2 * n, 2)) if hybrid else list(range(n))
    cost = generator.random((2 * n, 2 * n))
    cost[np.tril_indices(2 * n)] = np.nan
    rules = Rules(sparse=sparse, dense_first=first, filters=most, adjacent=adjacent)
    every = every_choice(layers, rules)
    if not every:
        with pytest.raises(HeadwiseError, match="do not leave"):
            best_choice(cost, layers, rules)
        return
    best = best_choice(cost, layers, rules)
    assert best in every
    assert total(cost, layers, best) == pytest.approx(cost_by_hand(cost, layers, best))
    assert total(cost, layers, best) == pytest.approx(min(cost_by_hand(cost, layers, choice) for choice in every))
    limit = generator.random() * n
    within = [choice.full for choice in every if cost_by_hand(cost, layers, choice) <= limit]
    found = cheapest(cost, layers, rules, limit)
    assert (found is None) == (not within)
    if found is not None:
        assert found in every and found.full == min(within) and total(cost, layers, found) <= limit + 1e-9


def test_what_is_costly_stays_dense() -> None:
    cost = np.full((10, 10), 0.1)
    cost[:, [4, 8]] = 5
    choice = best_choice(cost, range(10), Rules(sparse=0.7, filters=1))
    assert choice == Choice((0,), (4, 8)) and total(cost, range(10), choice) == pytest.approx(0.7)
    assert best_choice(cost, range(10), Rules(sparse=0.7, filters=2)).filter_layers == (0,)
    assert cheapest(cost, range(10), Rules(sparse=0.1, filters=1), 5.9) == Choice((0,), (4,))
    assert cheapest(cost, range(10), Rules(sparse=0.7), 0.1) is None


def test_a_choice_by_hand() -> None:
    assert by_hand(range(8), Rules(), [6, 3]) == Choice((3, 6), (0, 1, 2))
    assert by_hand(range(8), Rules(), [3], [7]) == Choice((3,), (0, 1, 2, 7))
    assert by_hand(range(8), Rules(adjacent=True), [3, 6]) == Choice((3, 6), (0, 1, 2, 4, 7))
    mass = np.full((8, 8), 0.5)
    assert kept(mass, range(8), by_hand(range(8), Rules(), [3, 6])) == pytest.approx((3 + 2 + 3 * 0.5) / 8)


def test_what_a_choice_is_compared_with() -> None:
    even = evenly_spaced(range(30), 3, (0, 1))
    assert even == Choice((2, 11, 21), (0, 1))
    assert evenly_spaced(range(10), 2, (0, 5, 6)) == Choice((1, 7), (0, 5, 6))
    drawn = random_choices(range(30), 3, (0, 1, 20), samples=50, seed=1)
    assert len(drawn) == 50 and len({c.filter_layers for c in drawn}) > 40
    assert drawn == random_choices(range(30), 3, (0, 1, 20), samples=50, seed=1)
    assert all(c.filter_layers[0] == 2 and c.dense_layers == (0, 1, 20) for c in drawn)
    assert not any(20 in c.filter_layers for c in drawn)


@pytest.mark.parametrize(
    ("filters", "dense", "message"),
    [
        ([4], [], "filter layer 4 is no full-attention layer: those are 1, 3, 5"),
        ([3], [2], "dense layer 2 is no full-attention layer: those are 1, 3, 5"),
        ([3, 3], [], "must be different layers, and at least one filters: got 3, 3 and none"),
        ([3], [3], "got 3 and 3"),
        ([], [], "got none and none"),
    ],
)
def test_a_choice_by_hand_is_checked(filters: list[int], dense: list[int], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        by_hand([1, 3, 5], Rules(), filters, dense)


def test_too_few_layers_and_holes_are_refused() -> None:
    with pytest.raises(HeadwiseError, match="3 full-attention layers of which 1 may attend to everything do"):
        best_choice(np.ones((3, 3)), [0, 1, 2], Rules(dense_first=1))
    cost = np.ones((4, 4))
    cost[1, 3] = np.nan
    with pytest.raises(HeadwiseError, match="lacks values of full-attention layers"):
        best_choice(cost, [0, 1, 2, 3], Rules())
