"""Allocations of a budget, against all combinations of a small problem."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kernels.patterns import make
from search.model.allocation import Heads
from tests.search.model.made import LAYERS, heads_of

TAIL = 64
SEARCHED = [0, 2]


def combinations(heads: Heads, values: np.ndarray) -> list[tuple[float, float, np.ndarray]]:
    """Cost, value and choice (2, H) of every combination of the searched heads' candidates."""
    own = heads.costs[TAIL][heads.searched]
    worth = values[heads.searched]
    found = []
    for choice in itertools.product(range(own.shape[2]), repeat=own.shape[0] * own.shape[1]):
        at = np.array(choice).reshape(own.shape[:2])[..., None]
        cost, value = (np.take_along_axis(of, at, -1)[..., 0] for of in (own, worth))
        found.append((float(cost.sum()), float(value.sum()), at[..., 0]))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weights", [(1, 1, 1), (4, 1, 0.25)])
def test_one_budget_is_spent_best(seed: int, weights: tuple[float, ...]) -> None:
    heads = heads_of(seed)
    weight = np.array(weights, dtype=float)
    kinds = {"text": 1.0, "answer": 3.0}
    loss = heads.curves[TAIL].loss(kinds) * weight[:, None, None]
    every = combinations(heads, loss)
    price = float(np.random.default_rng(seed).exponential())
    total, _, choice = min(every, key=lambda one: one[1] + price * one[0])
    found = heads.allocate(total, TAIL, weight=weight, prompt_weights=kinds)
    assert found.candidates[1].tolist() == [-1, -1]
    np.testing.assert_array_equal(found.candidates[SEARCHED], choice)
    assert found.cost == pytest.approx(total)
    best = min(value for cost, value, _ in every if cost <= total * (1 + 1e-9))
    assert np.nansum(found.pick(loss)) == pytest.approx(best)


def test_a_digest_tells_what_is_served() -> None:
    heads = heads_of(0, tails=(0, 64))
    some = heads.allocate(3.0, TAIL)
    heavier = heads.allocate(3.0, TAIL, weight=2 * np.ones(LAYERS))
    assert some.digest == heavier.digest and len(some.digest) == 32
    assert len({some.digest, replace(some, tail=0).digest, heads.allocate(100.0, TAIL).digest}) == 3


def test_rows_and_plans_name_patterns_and_leave_layers_out() -> None:
    candidates = (
        make("a_shape", sink=64, window=64),
        make("block_sparse", blocks=4),
        make("dense"),
        make("dense"),
    )
    found = heads_of(0).allocate(100, TAIL)
    rows, patterns = found.rows(candidates)
    assert rows[1] is None and rows[0] is not None and rows[2] is not None
    assert set(rows[0] + rows[2]) == set(patterns)
    plans = found.plans(candidates, 1)
    assert set(plans) == {0, 2} and all(plan.dense_tail == TAIL for plan in plans.values())
