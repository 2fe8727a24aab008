"""The trials of a search: the first ones, what parameters come to, and which trials make the front."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from artifacts import HeadwiseError
from kernels.patterns import make
from search.claims import KEY
from search.curves import Curves
from search.refine import SHARES, Problem, baselines, front
from tests.search.problems import problem_of

CANDIDATES = (
    make("a_shape", sink=64, window=64),
    make("vertical_slash", vertical=64, slash=64, last_q=64),
    make("vertical_slash", vertical=64, slash=64, last_q=256),
    make("dense"),
)


@pytest.fixture
def problem() -> Problem:
    """Eight layers of two heads, the second one sliding, whose curves are all alike."""
    change = np.tile(np.array([8.0, 4.0, 2.0, 1.0]), (8, 2, 1))
    costs = np.tile(np.array([1.0, 2.0, 3.0, 4.0]), (8, 2, 1))
    for values in (change, costs):
        values[1] = np.nan
    curves = Curves(change=change, error=change, recall=1 / change, tiles=costs)
    return problem_of(curves, costs, total=28.0, candidates=CANDIDATES)


def test_the_first_trials_are_the_papers_and_all_budgets_of_the_front() -> None:
    first = baselines()
    assert first[0] == {} and [one["share"] for one in first[1:]] == list(SHARES)
    # What was asked for comes first: a search that ends early has it.
    assert SHARES[0] == 1.0


def test_the_papers_way_is_one_budget_for_every_head(problem: Problem) -> None:
    settled = problem.settle(None)
    assert set(settled.chosen[[0, *range(2, 8)]].ravel()) == {1} and settled.cost == 28.0


def test_a_share_scales_the_budget_and_is_never_too_little(problem: Problem) -> None:
    assert [problem.settle({"share": share}).cost for share in (1.0, 1.4, 2.0)] == [28.0, 39.0, 56.0]
    assert problem.settle({"share": 0.1}).cost == problem.least == 14.0


def test_weights_move_the_budget_between_groups_of_layers(problem: Problem) -> None:
    settled = problem.settle({"weight_0": 1.0, "weight_5": -1.0})
    searched = np.flatnonzero(problem.curves.searched)
    groups = np.array_split(searched, 6)
    cost = np.nansum(settled.pick(problem.costs), axis=1)
    assert cost[groups[0]].mean() > cost[groups[5]].mean()
    assert settled.weight[groups[0]].tolist() == [2.0] * len(groups[0]) and settled.weight[groups[5][0]] == 0.5
    assert settled.cost <= 28.0


def test_dear_estimates_may_be_left_out(problem: Problem) -> None:
    assert 2 in problem.settle({"share": 1.5}).chosen
    assert 2 not in problem.settle({"share": 1.5, "last_q": 64}).chosen


def test_what_is_left_may_cost_more_at_least() -> None:
    """The cheapest candidate is one that the trial leaves out."""
    costs = np.array([[[3.0, 2.0, 1.0, 4.0]]])
    change = np.array([[[8.0, 8.0, 8.0, 1.0]]])
    curves = Curves(change=change, error=change, recall=change, tiles=costs)
    made = problem_of(curves, costs, total=1.5, candidates=CANDIDATES)
    assert made.settle({"last_q": 64}).cost == 2.0 and made.settle({}).cost == 1.0


def trial(place: int, cost: float, kl: float) -> optuna.trial.FrozenTrial:
    return optuna.trial.create_trial(state=TrialState.COMPLETE, values=[cost, kl], user_attrs={KEY: str(place)})


def test_the_front_is_of_trials_that_none_beats() -> None:
    found = front(
        [
            trial(0, 0.5, 0.01),
            trial(1, 1.0, 0.5),
            trial(2, 2.0, 0.5),
            trial(3, 3.0, 0.2),
            trial(4, 3.0, 0.1),
            trial(5, 4.0, 0.3),
            trial(6, 5.0, 0.05),
        ]
    )
    assert [int(one.user_attrs[KEY]) for one in found] == [1, 4, 6]


def test_the_papers_trial_alone_is_no_front() -> None:
    with pytest.raises(HeadwiseError, match="no trial but the paper's was finished: allow more"):
        front([trial(0, 1.0, 1.0)])


def test_density_is_to_dense_attention_not_to_the_widest_candidate() -> None:
    candidates = (make("vertical_slash", vertical=64, slash=64), make("dense"), make("block_sparse", blocks=9))
    tiles = np.array([[[5.0, 10.0, 11.0], [4.0, 10.0, 3.0]]])
    curves = Curves(change=tiles, error=tiles, recall=tiles, tiles=tiles)
    found = Problem(
        model=None,
        describe=None,
        candidates=candidates,
        curves=curves,
        costs=tiles,
        total=1.0,
        dense_tail=0,  # type: ignore[arg-type]
    )
    assert found.density.tolist() == [[[0.5, 1.0, 1.1], [0.4, 1.0, 0.3]]]
