"""The dynamic programme against all choices, and what choices are compared with."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts import HeadwiseError
from search.decode.filter_layers import Choice, Rules, best_choice, evenly_spaced, kept, total


def every_choice(layers: list[int], rules: Rules) -> list[Choice]:
    """By the definition: all sets of filter and dense layers that hold to the rules."""
    results = []
    for full in range(1, rules.full(len(layers)) + 1):
        for chosen in combinations(layers, full):
            for count in range(1, min(rules.filters, full) + 1):
                for filters in combinations(chosen, count):
                    choice = Choice(
                        filters, tuple(layer for layer in chosen if layer not in filters)
                    )
                    first = [layer for layer in layers if layer < filters[0]]
                    if len(first) >= rules.dense_first and set(first) <= set(choice.dense_layers):
                        results.append(choice)
    return results


def cost_by_hand(cost: np.ndarray, layers: list[int], choice: Choice) -> float:
    """Return the cost: for each sparse layer, the mass that its nearest earlier filter drops."""
    summed = 0.0
    latest = -1
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
    st.sampled_from([0.2, 0.4, 0.6]),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_filter_layers_have_minimal_cost(n, first, most, sparse, seed, hybrid):
    generator = np.random.default_rng(seed)
    layers = list(range(1, 2 * n, 2)) if hybrid else list(range(n))
    cost = generator.random((2 * n, 2 * n))
    cost[np.tril_indices(2 * n)] = np.nan
    rules = Rules(sparse=sparse, dense_first=first, filters=most)
    every = every_choice(layers, rules)
    if not every:
        with pytest.raises(HeadwiseError, match="leaves no filter layer"):
            best_choice(cost, layers, rules)
        return
    best = best_choice(cost, layers, rules)
    assert best in every
    assert total(cost, layers, best) == pytest.approx(cost_by_hand(cost, layers, best))
    assert total(cost, layers, best) == pytest.approx(
        min(cost_by_hand(cost, layers, choice) for choice in every)
    )


def test_costly_layers_stay_dense():
    cost = np.full((10, 10), 0.1)
    cost[:, [4, 8]] = 5
    choice = best_choice(cost, range(10), Rules(sparse=0.7, filters=1))
    assert choice == Choice((0,), (4, 8)) and total(cost, range(10), choice) == pytest.approx(0.7)
    assert best_choice(cost, range(10), Rules(sparse=0.7, filters=2)).filter_layers == (0,)


def test_retained_mass_equals_definition():
    mass = np.full((8, 8), 0.5)
    assert kept(mass, range(8), Choice((3, 6), (0, 1, 2))) == pytest.approx((3 + 2 + 3 * 0.5) / 8)


def test_baselines_of_a_selection():
    even = evenly_spaced(range(30), 3, (0, 1))
    assert even == Choice((2, 11, 21), (0, 1))
    assert evenly_spaced(range(10), 2, (0, 5, 6)) == Choice((1, 7), (0, 5, 6))


def test_too_few_layers_and_gaps_are_rejected():
    with pytest.raises(HeadwiseError, match=r"--dense-first 1 with --sparse 0\.6 leaves no"):
        best_choice(np.ones((3, 3)), [0, 1, 2], Rules(dense_first=1))
    cost = np.ones((4, 4))
    cost[1, 3] = np.nan
    with pytest.raises(HeadwiseError, match="lacks values of full-attention layers"):
        best_choice(cost, [0, 1, 2, 3], Rules())
