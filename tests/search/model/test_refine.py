"""Refinement around the closed-form answer, with losses by a formula in place of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts import HeadwiseError
from search.model.allocation import Allocation
from search.model.refine import Refinement, Trial, balanced, check_storage, refine
from search.model.task_losses import ContextLoss, TaskLoss
from tests.search.model.made import heads_of

TAILS = (0, 64)
# What the model makes of text and answers, in times of what the curves say.
TEXT, ANSWER = 1.5, 6.0


def task(name: str, loss: float, *, answers: int = 0) -> TaskLoss:
    return TaskLoss.of(name, [ContextLoss(digest=name, kl=loss, answers=answers, tokens=answers)])


def refinement(seed: int = 0, **changes: object) -> Refinement:
    heads = heads_of(seed, tails=TAILS)
    asked = {"heads": heads, "total": 3.0, "trials": 7, "seed": 0, "storage": None}
    return Refinement(**asked | {"name": "cfg", "quiet": False} | changes)  # type: ignore[arg-type]


def formula(asked: Refinement) -> object:
    """Text and answers lose what the curves say, each by its own factor."""

    def measure(some: Sequence[Allocation]) -> list[list[TaskLoss]]:
        found = []
        for one in some:
            losses = {
                kind: np.nansum(one.pick(v))
                for kind, v in asked.heads.curves[one.tail].losses().items()
            }
            text, answer = TEXT * float(losses["text"]), ANSWER * float(losses["answer"])
            found.append([task("prose", text), task("kv", answer, answers=3)])
        return found

    return measure


def test_kinds_are_balanced_by_what_a_run_shows_over_what_curves_say() -> None:
    asked = refinement()
    allocation = asked.heads.by_model(3.0, 64)
    predicted = {
        k: float(np.nansum(allocation.pick(v))) for k, v in asked.heads.curves[64].losses().items()
    }
    tasks = (
        task("prose", 2 * predicted["text"]),
        task("more", 4 * predicted["text"]),
        task("kv", 12 * predicted["answer"], answers=2),
    )
    found = balanced(asked.heads, Trial(name="", allocation=allocation, tasks=tasks))
    # Three times and twelve times: the geometric mean of both is 1.
    assert found == pytest.approx({"text": 0.5, "answer": 2.0})
    far = (
        task("prose", 1e-3 * predicted["text"]),
        task("kv", 1e3 * predicted["answer"], answers=2),
    )
    assert balanced(asked.heads, Trial(name="", allocation=allocation, tasks=far)) == {
        "text": 1 / 8,
        "answer": 8.0,
    }


def test_one_kind_has_nothing_to_balance() -> None:
    asked = refinement()
    heads = replace(
        asked.heads, curves={t: replace(c, asked=0) for t, c in asked.heads.curves.items()}
    )
    trial = Trial(name="", allocation=heads.by_model(3.0, 64), tasks=(task("prose", 1.0),))
    assert balanced(heads, trial) is None


def test_closed_form_trials_come_first_and_the_best_is_first() -> None:
    asked = refinement()
    counts: list[int] = []
    trials = refine(asked, formula(asked), counts.append)  # type: ignore[arg-type]
    assert counts == list(range(1, 8)) and len(trials) == 7
    assert {"curves", "balanced"} <= {trial.name for trial in trials}
    assert [t.loss for t in trials] == sorted(t.loss for t in trials)
    assert all(trial.allocation.cost <= asked.total * (1 + 1e-9) for trial in trials)
    # Of the dense tails the one that loses least by the curves.
    heads = asked.heads
    lost = {t: np.nansum(heads.by_model(3.0, t).pick(heads.curves[t].loss())) for t in TAILS}
    first = next(trial for trial in trials if trial.name == "curves")
    assert first.allocation.tail == min(lost, key=lambda tail: lost[tail])


def test_one_run_balances_and_says_what_is_to_be_expected_of_that() -> None:
    heads, counts = heads_of(5, tails=TAILS, heads=6, candidates=8), list[int]()
    how: dict[str, Any] = {"heads": heads, "total": heads.total(0.15)}
    asked = refinement(trials=1, **how)
    (alone,) = refine(asked, formula(asked), counts.append)  # type: ignore[arg-type]
    two = refine(refinement(trials=2, **how), formula(asked))  # type: ignore[arg-type]
    run = next(trial for trial in two if trial.name == "balanced")
    assert (
        counts == [1]
        and alone.name == "balanced"
        and alone.allocation.digest == run.allocation.digest
    )
    assert (
        next(trial for trial in two if trial.name == "curves").allocation.digest
        != run.allocation.digest
    )
    # Losses of the formula are proportional to those of the curves.
    assert [task.kl for task in alone.tasks] == pytest.approx([task.kl for task in run.tasks])
    text = TaskLoss.of("prose", [ContextLoss(digest="prose", kl=0.1, text=0.02)]).times(3)
    assert (text.kl, text.perplexity_ratio) == pytest.approx(
        (0.3, exp(0.06))
    ) and text.nll_rise is None


def test_the_same_seed_gives_the_same_trials_and_another_gives_others() -> None:
    def found(seed: int) -> list[tuple[str, str, float]]:
        asked = refinement(seed=seed)
        return [(t.name, t.allocation.digest, t.loss) for t in refine(asked, formula(asked))]  # type: ignore[arg-type]

    assert found(0) == found(0) != found(1)


def test_a_storage_holds_an_ordinary_study_of_these_trials(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path}/study.db"
    check_storage(url)
    for _ in range(2):
        asked = refinement(storage=url)
        trials = refine(asked, formula(asked))  # type: ignore[arg-type]
        study = optuna.load_study(study_name="cfg", storage=url)
        assert len(study.trials) == 7 and study.best_value == pytest.approx(trials[0].loss)
        assert sorted(t.value for t in study.trials) == pytest.approx(
            [trial.loss for trial in trials]
        )
        assert all(set(t.params) == {"group_0", "group_1", "dense_tail"} for t in study.trials)
    # Another rank leaves the storage alone, and draws the same.
    quiet = refinement(storage=f"sqlite:///{tmp_path}/none.db", quiet=True)
    assert [t.allocation.digest for t in refine(quiet, formula(quiet))] == [  # type: ignore[arg-type]
        t.allocation.digest for t in trials
    ]
    assert not (tmp_path / "none.db").exists()


def test_a_storage_that_cannot_be_opened_is_one_line_without_its_password() -> None:
    for url in ("study", "nosuch://me:secret@nowhere/db"):
        with pytest.raises(HeadwiseError, match="cannot use the storage") as error:
            check_storage(url)
        assert "\n" not in str(error.value) and "secret" not in str(error.value)
