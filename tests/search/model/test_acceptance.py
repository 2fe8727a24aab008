"""The gate's budgets with losses from a formula: proofs, raises, a cheaper budget, the frontier."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from artifacts import Finding
from search.model.acceptance import AIM, cheapest, gate
from search.model.allocation import Allocation
from search.model.limits import Limits
from search.model.losses import ContextLoss
from search.model.prompts import NoMoreText
from search.model.proof import KINDS, Kind
from search.model.run import Round, SearchRun
from tests.search.model.made import FormulaRun, heads_of

HEADS = heads_of(0, tails=(0, 64, 256), heads=12, candidates=24, dense=True)
BEST = HEADS.allocate(HEADS.total(0.3), 64)
PREDICTED = HEADS.predicted_by_kind(BEST)
LIMITS = Limits()


@dataclass(frozen=True)
class Prompts:
    """Contexts of a batch, in place of prompts and of their reference."""

    batch: int
    kind: Kind
    count: int

    @property
    def sequences(self) -> tuple[Any, ...]:
        task = {"text": "prose", "answer": "facts"}[self.kind]
        digests = (f"{self.batch}.{at}" for at in range(self.count))
        return tuple(SimpleNamespace(task=task, digest=digest) for digest in digests)


@dataclass
class Batches:
    """Contexts for so many rounds, then NoMoreText."""

    rounds: int = 9
    taken: list[Prompts] = field(default_factory=list)
    kinds = KINDS

    def take(self, kind: Kind, contexts: int, *, every: bool) -> Prompts:
        self.rounds -= every and kind == KINDS[0]
        if self.rounds < 0:
            raise NoMoreText("own.txt has no text left; take a longer text")
        self.taken.append(Prompts(len(self.taken), kind, contexts))
        return self.taken[-1]


def searched(
    text: float,
    answer: float,
    *,
    fixed: bool = False,
    spread: float = 0.0,
    steady: bool = False,
    prefill: float = 0.0,
    rounds: int = 9,
) -> Any:
    """Run the gate where BEST loses these multiples of the limits, and others in proportion.

    Args:
        text: perplexity rise of BEST over its limit.
        answer: answers lost of BEST over the limit.
        fixed: as for `gate`.
        spread: of the contexts, relative to their loss.
        steady: True if every allocation loses as much.
        prefill: seconds of a dense one.
        rounds: for which there are held-out prompts.
    """

    def formula(prompts: Prompts, one: Allocation, numbers: Any) -> Sequence[ContextLoss]:
        ratios = {
            kind: loss / PREDICTED[kind] for kind, loss in HEADS.predicted_by_kind(one).items()
        }
        if steady:
            ratios = dict.fromkeys(ratios, 1.0)
        losses = []
        for at, sequence in enumerate(prompts.sequences):
            own: dict[str, Any] = {"task": sequence.task, "digest": sequence.digest, "kl": 0.01}
            factor = 1 + spread * (-1) ** at
            if prompts.kind == "text":
                own["text"] = text * ratios["text"] * LIMITS.max_perplexity * factor
            else:
                lost = min(1.0, answer * ratios["answer"] * LIMITS.max_lost * factor)
                own |= {"answers": 500, "tokens": 500.0, "dense_right": 400}
                own |= {"clear": 400.0, "fall": 400.0 * lost}
            losses.append(ContextLoss(**own))
        return [losses[at] for at in numbers] if numbers is not None else losses

    run = FormulaRun(formula, heads=HEADS, allocation=BEST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search.model.acceptance.prefill_seconds", lambda _: prefill)
        gate(cast(Any, run), LIMITS, cast(Any, Batches(rounds)), fixed=fixed)
    return run


def costs(run: Any) -> list[float]:
    return [each.allocation.cost for each in run.rounds]


def test_proven_first_budget_is_accepted():
    run = searched(0.5, 0.4)
    (first,) = run.rounds
    assert run.accepted is first and run.allocation is BEST and first.proof.verdict.proven
    assert first.name == "round 1"
    # A trial for the budget, and one for each point of the front.
    assert len(run.trials) == 1 + len(run.points)


def test_unproven_budget_is_raised_until_another_is_proven(capsys):
    run = searched(0.5, 1.6)
    assert len(run.rounds) == 2 and run.accepted is run.rounds[-1]
    assert run.accepted.proof.verdict.proven and costs(run)[1] > costs(run)[0]
    # The corrected curve aims at a part of the limit.
    ratio = HEADS.predicted_by_kind(run.allocation)["answer"] / PREDICTED["answer"]
    assert 0.6 * AIM < 1.6 * ratio <= AIM
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(
        r"round 1 proves nothing: facts: 8\.0% fewer correct answers .*; budget raised from "
        r"0\.299 to 0\.\d+ of dense attention's operations$",
        line,
    ), line


def test_each_budget_has_contexts_of_its_own():
    run = searched(0.5, 1.6)
    first, second = ({each.digest for each in one.sequences} for one in run.rounds)
    assert first and second and not first & second


def test_loss_far_below_the_limits_tries_one_cheaper_budget(capsys):
    run = searched(0.02, 0.02)
    first, second = costs(run)
    assert second < first and run.accepted is run.rounds[1]
    assert "is proven with much to spare" in capsys.readouterr().err


def test_cheaper_budget_is_not_tried_where_the_first_token_hardly_gains(monkeypatch, capsys):
    monkeypatch.setattr("tests.search.model.test_acceptance.HEADS", replace(HEADS, unit="seconds"))
    first, second = costs(searched(0.02, 0.02, prefill=0.0))
    saved = first - second
    assert "is proven with much to spare" in capsys.readouterr().err
    assert len(costs(searched(0.02, 0.02, prefill=99 * saved))) == 2
    (only,) = costs(searched(0.02, 0.02, prefill=101 * saved))
    assert only == first
    says = f"but a cheaper budget would make the first token {saved:.2g} s sooner, less than 1%"
    assert says in capsys.readouterr().err


def test_cheaper_budget_that_is_not_proven_leaves_the_first(monkeypatch, capsys):
    # A prediction that is far off: the cheaper budget loses ten times as much as it says.
    monkeypatch.setattr("search.model.acceptance._LARGER", 30.0)
    monkeypatch.setattr("search.model.acceptance.AIM", 10.0)
    run = searched(0.1, 0.15)
    assert len(run.rounds) == 2 and run.accepted is run.rounds[0] and run.allocation is BEST
    assert "round 2 proves nothing: " in capsys.readouterr().err


def test_cheaper_budget_without_held_out_prompts_leaves_the_first(capsys):
    run = searched(0.02, 0.02, rounds=1)
    assert run.accepted is run.rounds[0] and len(run.rounds) == 1 and run.allocation is BEST
    says = "a cheaper budget cannot be tested: own.txt has no text left; take a longer text; round"
    assert says in capsys.readouterr().err


def test_raised_budget_without_held_out_prompts_is_a_finding():
    says = (
        r"not proven: facts: 8\.0% fewer correct answers .* spent, and a larger budget needs other "
        r"held-out prompts: own\.txt has no text left; take a longer text, or --budget, "
    )
    with pytest.raises(Finding, match=says):
        searched(0.5, 1.6, rounds=1)


def test_fixed_budget_is_accepted_whatever_it_loses():
    run = searched(5.0, 9.0, fixed=True)
    (only,) = run.rounds
    assert run.accepted is only and not only.proof.verdict.proven


def test_no_proven_budget_is_a_finding():
    says = (
        r"not proven: .* fewer correct answers .*, the limit is 5\.0% \(--max-lost\), with \d\.\d+ "
        r"of dense attention's operations spent; take more --samples, allow more loss, or take "
        r"--budget, which writes an artifact whatever it loses$"
    )
    with pytest.raises(Finding, match=says):
        searched(0.1, 1.5, steady=True)


def test_points_are_measured_on_one_context_of_each_task():
    run = searched(0.5, 0.4)
    assert run.points[0][0] is BEST and 1 < len(run.points) <= 3
    for _, losses in run.points:
        assert [loss.task for loss in losses] == ["prose", "facts"]


@pytest.mark.parametrize("factor", [0.2, 0.6, 2.0])
def test_cheapest_meets_each_target_at_the_least_cost(factor):
    found = cheapest(HEADS, BEST, {"text": factor, "answer": factor})
    losses = HEADS.predicted_by_kind(found)
    assert all(loss <= factor * PREDICTED[kind] for kind, loss in losses.items())
    assert found.tail == BEST.tail
    less = HEADS.reallocate(BEST, found.cost * 0.97)
    lost = HEADS.predicted_by_kind(less)
    assert any(loss > factor * PREDICTED[kind] for kind, loss in lost.items())


def test_round_lists_the_sequences_of_all_its_looks():
    run = searched(0.5, 0.9, spread=0.4)
    first: Round = run.rounds[0]
    assert len(first.sequences) == first.proof.verdict.contexts + first.proof.verdict.windows


def test_tasks_of_a_run_are_those_of_the_accepted_round():
    run = searched(0.5, 0.4)
    run.length = 512
    tasks = cast(Any, SearchRun.tasks).fget(run)
    assert {task.task for task in tasks} == {"prose", "facts"}
