"""What heads get for a budget, against all combinations of a small problem."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from artifacts import HeadwiseError
from kernels.patterns import make
from search.curves import Curves
from search.settle import by_head, by_model, rows_of

LAYERS, HEADS, CANDIDATES = 3, 2, 4


def problem(seed: int) -> tuple[Curves, np.ndarray]:
    """Layer 1 slides; more cost is less change and error, but not in the same order for all heads."""
    rng = np.random.default_rng(seed)
    shape = (LAYERS, HEADS, CANDIDATES)
    costs = np.sort(rng.exponential(size=shape), axis=-1) + 0.1
    change = -np.sort(-rng.exponential(size=shape) * rng.exponential(size=shape[:2])[..., None], axis=-1)
    error = rng.exponential(size=shape)
    for values in (costs, change, error):
        values[1] = np.nan
    return Curves(change=change, error=error, recall=1 - change, tiles=costs), costs


def combinations(costs: np.ndarray, values: np.ndarray) -> list[tuple[float, float, tuple[int, ...]]]:
    """Cost, value and choice of every combination of the four heads' candidates."""
    own, worth = costs[[0, 2]].reshape(4, -1), values[[0, 2]].reshape(4, -1)
    heads = range(4)
    return [
        (
            sum(own[h, c] for h, c in zip(heads, choice, strict=True)),
            sum(worth[h, c] for h, c in zip(heads, choice, strict=True)),
            choice,
        )
        for choice in itertools.product(range(CANDIDATES), repeat=4)
    ]


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("weights", [(1, 1, 1), (4, 1, 0.25)])
def test_one_budget_is_spent_best(seed: int, weights: tuple[float, ...]) -> None:
    curves, costs = problem(seed)
    weight = np.array(weights, dtype=float)
    every = combinations(costs, curves.change * weight[:, None, None])
    price = float(np.random.default_rng(seed).exponential())
    total, _, choice = min(every, key=lambda one: one[1] + price * one[0])
    settled = by_model(curves, costs, total, weight=weight)
    assert settled.chosen[1].tolist() == [-1, -1]
    assert tuple(settled.chosen[[0, 2]].ravel()) == choice
    assert settled.cost == pytest.approx(total)
    best = min(value for cost, value, _ in every if cost <= total * (1 + 1e-9))
    assert np.nansum(settled.pick(curves.change) * weight[:, None]) == pytest.approx(best)


def test_a_weight_moves_the_budget() -> None:
    change = np.tile(np.array([4.0, 2.0, 1.0, 0.5]), (2, 1, 1))
    costs = np.tile(np.array([1.0, 2.0, 3.0, 4.0]), (2, 1, 1))
    curves = Curves(change=change, error=change, recall=change, tiles=costs)
    assert by_model(curves, costs, 5, weight=np.array([9.0, 1.0])).chosen.ravel().tolist() == [3, 0]
    assert by_model(curves, costs, 5, weight=np.array([1.0, 9.0])).chosen.ravel().tolist() == [0, 3]


def test_what_is_not_allowed_is_not_taken() -> None:
    curves, costs = problem(3)
    allowed = np.array([True, False, True, False])
    settled = by_model(curves, costs, 100, weight=np.ones(LAYERS), allowed=allowed)
    assert set(settled.chosen.ravel()) <= {-1, 0, 2}


def test_too_little_is_told() -> None:
    curves, costs = problem(0)
    with pytest.raises(HeadwiseError, match=r"a total of 0\.1 is too small for 4 parts"):
        by_model(curves, costs, 0.1, weight=np.ones(LAYERS))


@pytest.mark.parametrize("seed", range(15))
def test_a_budget_for_each_head_is_the_largest_that_all_can_have(seed: int) -> None:
    curves, costs = problem(seed)
    total = float(np.nansum(costs)) / CANDIDATES

    def chosen(each: float) -> np.ndarray:
        fits = (costs <= each) | (costs <= np.min(costs, axis=-1, keepdims=True))
        places = np.argmin(np.where(fits, curves.error, np.inf), axis=-1)
        return np.where(np.isnan(costs[..., 0]), -1, places)

    def cost(places: np.ndarray) -> float:
        return sum(costs[layer, head, places[layer, head]] for layer in (0, 2) for head in range(HEADS))

    budgets = np.unique(costs[np.isfinite(costs)])
    expected = next(places for each in budgets[::-1] if cost(places := chosen(each)) <= total)
    settled = by_head(curves, costs, total)
    np.testing.assert_array_equal(settled.chosen, expected)
    assert settled.cost == pytest.approx(cost(expected)) and settled.price is None


def test_heads_that_nothing_fits_take_their_cheapest() -> None:
    curves, costs = problem(0)
    settled = by_head(curves, costs, 1e-6)
    np.testing.assert_array_equal(settled.chosen, [[0, 0], [-1, -1], [0, 0]])


def test_rows_name_patterns_and_leave_layers_out() -> None:
    curves, costs = problem(0)
    candidates = (make("a_shape", sink=64, window=64), make("block_sparse", blocks=4), make("dense"), make("dense"))
    rows, patterns = rows_of(by_model(curves, costs, 100, weight=np.ones(LAYERS)), candidates)
    assert rows[1] is None and rows[0] is not None and rows[2] is not None
    assert set(rows[0] + rows[2]) == set(patterns)
