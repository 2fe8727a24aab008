"""Spending a budget: the best choice for its total, over parts and over the heads of a model, and a
price that agrees."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from artifacts import HeadwiseError
from kernels.patterns import make
from search.model.allocation import CostCurves
from search.model.hulls import hull, slope, spend
from tests.search.model.made import heads_of

TAIL = 64
SEARCHED = [0, 2]


def chosen_at(price: float, losses: np.ndarray, costs: np.ndarray) -> list[int]:
    """Each part's step by step up its hull while a step saves more than the price."""
    wide = np.broadcast_to(costs, losses.shape)
    results = []
    for cost, loss in zip(wide, losses, strict=True):
        line = hull(cost, loss)
        steps = itertools.takewhile(
            lambda two: slope(cost, loss, *two) > price,  # noqa: B023
            itertools.pairwise(line),
        )
        results.append([line[0], *(dearer for _, dearer in steps)][-1])
    return results


def cost_of(entries: list[int], costs: np.ndarray) -> float:
    return float(sum(row[entry] for row, entry in zip(costs, entries, strict=True)))


@pytest.mark.parametrize("seed", range(6))
def test_selection_by_recorded_price_stays_within_budget(seed):
    """Also if steep steps do not fit and flatter ones do: their slope is not the price."""
    rng = np.random.default_rng(seed)
    parts = int(rng.integers(2, 9))
    shape = parts, int(rng.integers(2, 7))
    costs = np.cumsum(rng.exponential(size=shape) * 10 ** rng.uniform(-2, 2, size=shape), axis=1)
    losses = rng.exponential(size=shape) * 10 ** rng.uniform(-3, 3, size=(parts, 1))
    total = float(rng.uniform(costs[:, 0].sum(), costs[:, -1].sum()))
    entries, price = spend(losses, costs, total)
    by_price = chosen_at(price, losses, costs)
    limit = cost_of(entries, costs) * (1 + 1e-9)
    assert cost_of(by_price, costs) <= limit <= total * (1 + 1e-9)
    if price == 0:
        assert by_price == entries
    # A part with a different entry got a larger one: the remainder fitted a flatter step.
    assert all(
        costs[part, a] <= costs[part, b]
        for part, (a, b) in enumerate(zip(by_price, entries, strict=True))
    )
    # And it is no higher than it must be: a little below it, the step that did not fit would be
    # taken.
    if price > 0:
        below = chosen_at(price * (1 - 1e-9), losses, costs)
        assert cost_of(below, costs) > cost_of(by_price, costs)


@pytest.mark.parametrize("seed", range(6))
def test_hull_includes_collinear_entries(seed):
    """The hull consists of exactly the entries on a straight line, up to rounding."""
    rng = np.random.default_rng(seed)
    costs = np.append(np.sort(rng.uniform(size=6)), 1.5) * 10 ** rng.uniform(-9, 9)
    losses = 0.3 - 0.1 * costs / costs[-1] * rng.uniform(0.1, 1)
    assert hull(costs, losses) == list(range(7))
    losses[3] += 1e-6
    assert hull(costs, losses) == [0, 1, 2, 4, 5, 6]
    entries, price = spend(losses[None], costs, costs[5] * (1 + 1e-9))
    assert entries == [5] and price == pytest.approx(slope(costs, losses, 0, 6), rel=1e-6)


INF = np.inf
TWO = [[8.0, 4.0, 3.0], [6.0, 3.0, 2.5]]
EVEN = [[8.0, 4.0, 0.0], [8.0, 4.0, 0.0]]
UNEVEN = [[1.0, 2.0, 3.0], [1.0, 5.0, 9.0]]


@pytest.mark.parametrize(
    ("losses", "costs", "total", "entries", "price"),
    [
        # The price is that of the first step that does not fit, whatever fitted before.
        (TWO, (1, 2, 3), 6.0, [2, 2], 0.0),
        (TWO, (1, 2, 3), 2.0, [0, 0], 4.0),
        (TWO, (1, 2, 3), 4.0, [1, 1], 1.0),
        # Costs that differ between parts, also unsorted; not even a step that is a little too dear.
        (EVEN, UNEVEN, 4.0, [2, 0], 1.0),
        (EVEN, UNEVEN, 12.0, [2, 2], 0.0),
        (EVEN[:1], UNEVEN[:1], 1.95, [0], 4.0),
        ([[0.0, 4.0, 8.0]], [[3.0, 2.0, 1.0]], 2.5, [1], 4.0),
        # An infinite loss is never taken; of equal entries the last is.
        ([[INF, 4.0, 1.0], [5.0, INF, 0.0]], (1, 2, 3), 3.0, [1, 0], 3.0),
        ([[INF, 4.0, 1.0], [5.0, INF, 0.0]], (1, 2, 3), 6.0, [2, 2], 0.0),
        ([[5.0, 0.0, 0.0]], (1, 2, 2), 2.0, [2], 0.0),
        ([[5.0, 0.0, 0.0]], (1, 2, 3), 3.0, [1], 0.0),
    ],
)
def test_spend_takes_the_steepest_steps_that_fit(losses, costs, total, entries, price):
    taken, at = spend(np.array(losses), np.array(costs), total)
    assert taken == entries and at == pytest.approx(price)


def test_spend_of_less_than_the_least_names_both():
    with pytest.raises(HeadwiseError, match=r"1\.9 .* least is 2"):
        spend(np.array(EVEN), np.array(UNEVEN), 1.9)


def combinations(heads: CostCurves, values: np.ndarray) -> list[tuple[float, float, np.ndarray]]:
    """Cost, value and choice (2, H) of every combination of the searched heads' candidates."""
    own = heads.costs[TAIL][heads.searched]
    gains = values[heads.searched]
    results = []
    for choice in itertools.product(range(own.shape[2]), repeat=own.shape[0] * own.shape[1]):
        at = np.array(choice).reshape(own.shape[:2])[..., None]
        cost, value = (np.take_along_axis(of, at, -1)[..., 0] for of in (own, gains))
        results.append((float(cost.sum()), float(value.sum()), at[..., 0]))
    return results


@pytest.mark.parametrize("seed", range(4))
def test_allocation_of_one_budget_is_optimal(seed):
    heads = heads_of(seed)
    kinds = {"text": 1.0, "answer": 3.0}
    loss = heads.curves[TAIL].loss(kinds)
    every = combinations(heads, loss)
    price = float(np.random.default_rng(seed).exponential())
    total, _, choice = min(every, key=lambda entry: entry[1] + price * entry[0])
    allocation = heads.allocate(total, TAIL, prompt_weights=kinds)
    assert allocation.candidates[1].tolist() == [-1, -1]
    np.testing.assert_array_equal(allocation.candidates[SEARCHED], choice)
    assert allocation.cost == pytest.approx(total)
    best = min(value for cost, value, _ in every if cost <= total * (1 + 1e-9))
    assert np.nansum(allocation.pick(loss)) == pytest.approx(best)


def test_digest_identifies_the_allocation():
    heads = heads_of(0, tails=(0, 64))
    some = heads.allocate(3.0, TAIL)
    heavier = heads.allocate(3.0, TAIL, prompt_weights={"text": 2.0, "answer": 2.0})
    assert some.digest == heavier.digest and len(some.digest) == 32
    assert len({some.digest, replace(some, tail=0).digest, heads.allocate(100.0, TAIL).digest}) == 3


def test_rows_and_plans_name_patterns_and_skip_layers():
    candidates = (
        make("a_shape", sink=64, window=64),
        make("block_sparse", blocks=4),
        make("dense"),
        make("dense"),
    )
    allocation = heads_of(0).allocate(100, TAIL)
    rows, patterns = allocation.rows(candidates)
    assert rows[1] is None and rows[0] is not None and rows[2] is not None
    assert set(rows[0] + rows[2]) == set(patterns)
    plans = allocation.plans(candidates, 1)
    assert set(plans) == {0, 2} and all(plan.dense_tail == TAIL for plan in plans.values())
