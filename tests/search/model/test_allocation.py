"""What heads get for a budget, against all combinations of a small problem."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from artifacts import HeadwiseError
from kernels.patterns import make
from search.model.allocation import Heads, slowest
from tests.search.model.made import CANDIDATES, HEADS, LAYERS, curves_of, heads_of

TAIL = 64
SEARCHED = [0, 2]


def combinations(heads: Heads, values: np.ndarray) -> list[tuple[float, float, np.ndarray]]:
    """Cost, value and choice (2, H) of every combination of the searched heads' candidates."""
    own, worth = heads.costs[TAIL][heads.searched], values[heads.searched]
    found = []
    for choice in itertools.product(range(own.shape[2]), repeat=own.shape[0] * own.shape[1]):
        at = np.array(choice).reshape(own.shape[:2])[..., None]
        cost, value = (np.take_along_axis(of, at, -1)[..., 0] for of in (own, worth))
        spent = cost.sum() if heads.ranks == 1 else heads.ranks * slowest(cost, heads.ranks)
        found.append((float(spent), float(value.sum()), at[..., 0]))
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("weights", [(1, 1, 1), (4, 1, 0.25)])
def test_one_budget_is_spent_best(seed: int, weights: tuple[float, ...]) -> None:
    heads, weight, kinds = heads_of(seed), np.array(weights, dtype=float), {"text": 1.0, "answer": 3.0}
    loss = heads.curves[TAIL].loss(kinds) * weight[:, None, None]
    every = combinations(heads, loss)
    price = float(np.random.default_rng(seed).exponential())
    total, _, choice = min(every, key=lambda one: one[1] + price * one[0])
    found = heads.by_model(total, TAIL, weight=weight, kinds=kinds)
    assert found.chosen[1].tolist() == [-1, -1]
    np.testing.assert_array_equal(found.chosen[SEARCHED], choice)
    assert found.cost == pytest.approx(total)
    best = min(value for cost, value, _ in every if cost <= total * (1 + 1e-9))
    assert np.nansum(found.pick(loss)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_over_ranks_it_is_the_best_of_all_combinations(seed: int) -> None:
    """Two layers of two ranks with two heads, whose steps cost alike and save less and less."""
    rng = np.random.default_rng(seed)
    drops = -np.sort(-rng.exponential(size=(2, 4, 2)), axis=-1)
    change = np.concatenate([np.zeros((2, 4, 1)), -np.cumsum(drops, axis=-1)], axis=-1) + 20
    costs = {TAIL: np.broadcast_to(np.array([1.0, 2.0, 3.0]), change.shape)}
    heads = Heads(curves={TAIL: curves_of(change)}, costs=costs, all_keys=3.0, ranks=2)
    every = combinations(heads, change)
    for total in (8.0, 12.0, 14.0, 18.0):
        found = heads.by_model(total, TAIL)
        assert found.cost == pytest.approx(2 * slowest(found.pick(costs[TAIL]), 2)) and found.cost <= total
        best = min(value for cost, value, _ in every if cost <= total)
        assert found.pick(change).sum() == pytest.approx(best)


@pytest.mark.parametrize("seed", range(50))
def test_over_ranks_the_slowest_keeps_to_the_budget(seed: int) -> None:
    heads = heads_of(seed, ranks=2, heads=6)
    worst = heads.costs[TAIL][SEARCHED].reshape(2, 2, 3, -1)
    least, most = (2 * float(of(worst, axis=-1).sum(-1).max(-1).sum()) for of in (np.min, np.max))
    lost = []
    for total in np.linspace(least * 1.0001, most, 5):
        found = heads.by_model(float(total), TAIL)
        own = found.pick(heads.costs[TAIL])[SEARCHED]
        assert found.cost == pytest.approx(2 * slowest(own, 2)) and found.cost <= total * (1 + 1e-9)
        lost.append(np.nansum(found.pick(heads.curves[TAIL].loss())))
    assert lost[-1] == pytest.approx(heads.curves[TAIL].loss()[SEARCHED].min(-1).sum()) and lost[-1] <= min(lost[:-1])


def test_one_dense_head_makes_its_rank_the_slowest() -> None:
    """Both heads of the first rank lose much: with two ranks its other head gets less, with one all that it needs."""
    change = np.tile(np.array([4.0, 0.1]), (1, 4, 1))
    change[0, 1] *= 0.7
    change[0, 2:] /= 100
    costs = {0: np.tile(np.array([1.0, 5.0]), (1, 4, 1))}
    one = Heads(curves={0: curves_of(change)}, costs=costs, all_keys=5.0)
    assert one.by_model(12.0, 0).chosen.tolist() == [[1, 1, 0, 0]]
    two = replace(one, ranks=2).by_model(12.0, 0)
    assert two.chosen[0].reshape(2, 2).sum(-1).tolist() == [1, 1] and two.cost == 12.0


def test_a_number_of_ranks_that_does_not_divide_the_heads() -> None:
    with pytest.raises(HeadwiseError, match="--tensor-parallel 3 does not divide 2 query heads"):
        heads_of(0, ranks=3).by_model(100.0, TAIL)


def test_a_weight_moves_the_budget() -> None:
    change = np.tile(np.array([4.0, 2.0, 1.0, 0.5]), (2, 1, 1))
    costs = {0: np.tile(np.array([1.0, 2.0, 3.0, 4.0]), (2, 1, 1))}
    heads = Heads(curves={0: curves_of(change)}, costs=costs, all_keys=4.0)
    assert heads.by_model(5, 0, weight=np.array([9.0, 1.0])).chosen.ravel().tolist() == [3, 0]
    assert heads.by_model(5, 0, weight=np.array([1.0, 9.0])).chosen.ravel().tolist() == [0, 3]
    assert heads.total(0.5) == 4.0 and heads.least(0) == 2.0


def test_what_is_not_allowed_is_not_taken() -> None:
    found = heads_of(3).by_model(100, TAIL, allowed=np.array([True, False, True, False]))
    assert set(found.chosen.ravel()) <= {-1, 0, 2}


def test_too_little_is_one_line() -> None:
    with pytest.raises(HeadwiseError, match=r"a total of 0\.1 is too small for 4 parts"):
        heads_of(0).by_model(0.1, TAIL)


@pytest.mark.parametrize("seed", range(15))
def test_a_budget_for_each_head_is_the_largest_that_all_can_have(seed: int) -> None:
    heads = heads_of(seed)
    own, error = heads.costs[TAIL], heads.curves[TAIL].error
    total = float(np.nansum(own)) / CANDIDATES

    def chosen(each: float) -> np.ndarray:
        fits = (own <= each) | (own <= np.min(own, axis=-1, keepdims=True))
        entries = np.argmin(np.where(fits, error, np.inf), axis=-1)
        return np.where(np.isnan(own[..., 0]), -1, entries)

    def cost(entries: np.ndarray) -> float:
        return sum(own[layer, head, entries[layer, head]] for layer in SEARCHED for head in range(HEADS))

    # With more, a head may go back to a cheaper candidate of less error: the largest is looked for from above.
    budgets = np.unique(own[np.isfinite(own)])
    expected = next(entries for each in budgets[::-1] if cost(entries := chosen(each)) <= total)
    found = heads.by_head(total, TAIL)
    np.testing.assert_array_equal(found.chosen, expected)
    assert found.cost == pytest.approx(cost(expected)) and found.price is None


def test_heads_that_nothing_fits_take_their_cheapest() -> None:
    np.testing.assert_array_equal(heads_of(0).by_head(1e-6, TAIL).chosen, [[0, 0], [-1, -1], [0, 0]])


def test_a_digest_tells_what_is_served() -> None:
    heads = heads_of(0, tails=(0, 64))
    some = heads.by_model(3.0, TAIL)
    heavier = heads.by_model(3.0, TAIL, weight=2 * np.ones(LAYERS))
    assert some.digest == heavier.digest and len(some.digest) == 32
    assert len({some.digest, replace(some, tail=0).digest, heads.by_model(100.0, TAIL).digest}) == 3


def test_rows_and_plans_name_patterns_and_leave_layers_out() -> None:
    candidates = (make("a_shape", sink=64, window=64), make("block_sparse", blocks=4), make("dense"), make("dense"))
    found = heads_of(0).by_model(100, TAIL)
    rows, patterns = found.rows(candidates)
    assert rows[1] is None and rows[0] is not None and rows[2] is not None
    assert set(rows[0] + rows[2]) == set(patterns)
    plans = found.plans(candidates, 1)
    assert set(plans) == {0, 2} and all(plan.dense_tail == TAIL for plan in plans.values())
