"""What heads get for a budget, against all combinations of a small problem."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from artifacts import HeadwiseError
from kernels.patterns import make
from search.model.allocation import Heads, spent_by
from tests.search.model.made import LAYERS, curves_of, heads_of

TAIL = 64
SEARCHED = [0, 2]


def slowest(cost: np.ndarray, ranks: int) -> float:
    """What layers (L, H) cost where each waits for the slowest of its ranks."""
    width = cost.shape[1] // ranks
    return ranks * sum(max(row[at : at + width].sum() for at in range(0, cost.shape[1], width)) for row in cost)


def combinations(heads: Heads, values: np.ndarray) -> list[tuple[float, float, np.ndarray]]:
    """Cost, value and choice (2, H) of every combination of the searched heads' candidates."""
    own, worth = heads.costs[TAIL][heads.searched], values[heads.searched]
    found = []
    for choice in itertools.product(range(own.shape[2]), repeat=own.shape[0] * own.shape[1]):
        at = np.array(choice).reshape(own.shape[:2])[..., None]
        cost, value = (np.take_along_axis(of, at, -1)[..., 0] for of in (own, worth))
        found.append((slowest(cost, heads.ranks), float(value.sum()), at[..., 0]))
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


@pytest.mark.parametrize("seed", range(40))
def test_over_ranks_it_is_the_best_for_what_the_slowest_takes(seed: int) -> None:
    """Everett's condition over all combinations: heads of any costs, two ranks of two heads or four of one."""
    heads = heads_of(seed, ranks=2 + seed % 2 * 2, heads=4, candidates=3)
    loss = heads.curves[TAIL].loss()
    every = combinations(heads, loss)
    price = float(np.random.default_rng(seed).exponential()) / 2
    total, expected, _ = min(every, key=lambda one: one[1] + price * one[0])
    found = heads.by_model(total, TAIL)
    assert np.nansum(found.pick(loss)) == pytest.approx(expected)
    assert found.cost == pytest.approx(total) and found.price <= price * (1 + 1e-9)
    assert spent_by(found.pick(heads.costs[TAIL])[SEARCHED], heads.ranks) == pytest.approx(total)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_over_ranks_many_heads_lose_no_more_with_more(ranks: int, seed: int) -> None:
    """More choices than are weighed against each other; no price of all ranks' time shows a better one to be wrong."""
    heads = heads_of(seed, ranks=ranks, heads=12, candidates=8)
    own, loss = heads.costs[TAIL][SEARCHED], heads.curves[TAIL].loss()[SEARCHED]
    least, most = heads.least(TAIL), spent_by(own.max(-1), ranks)
    lost = []
    for share in (0.001, 0.1, 0.3, 0.6, 1.0):
        total = least + share * (most - least)
        found = heads.by_model(total, TAIL)
        lost.append(float(np.nansum(found.pick(heads.curves[TAIL].loss()))))
        assert found.cost <= total * (1 + 1e-9)
        assert all(lost[-1] >= (loss + p * own).min(-1).sum() - p * total for p in np.geomspace(1e-3, 1e2, 30))
    assert lost == sorted(lost, reverse=True) and lost[-1] == pytest.approx(loss.min(-1).sum())


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


def test_what_is_not_allowed_is_not_taken() -> None:
    found = heads_of(3).by_model(100, TAIL, allowed=np.array([True, False, True, False]))
    assert set(found.chosen.ravel()) <= {-1, 0, 2}


def test_too_little_is_one_line() -> None:
    with pytest.raises(HeadwiseError, match=r"a total of 0\.1 is too small for 4 parts"):
        heads_of(0).by_model(0.1, TAIL)


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
