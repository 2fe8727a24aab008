"""Refinement around the closed-form answer, with losses by a formula in place of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from artifacts import HeadwiseError
from profiling.ranks import Ranks
from search.model.allocation import Allocation, Heads
from search.model.config import passwords, without_password
from search.model.refine import balance, check_storage, refine
from search.model.search_run import Measured
from search.model.task_losses import ContextLoss, TaskLoss
from tests.search.model.made import FormulaRun, heads_of

TAILS = (0, 64)
FEW = heads_of(0, tails=TAILS)
TOTAL = 3.0
MANY = heads_of(5, tails=TAILS, heads=6, candidates=8)
# Factors between the losses of the model and those of the curves.
TEXT = 1.5
ANSWER = 6.0


def task(name: str, loss: float, *, answers: int = 0) -> TaskLoss:
    return TaskLoss.of(name, [ContextLoss(digest=name, kl=loss, answers=answers, tokens=answers)])


def predicted(known: Heads, allocation: Allocation) -> dict[str, float]:
    losses = known.curves[allocation.tail].losses()
    return {kind: float(np.nansum(allocation.pick(loss))) for kind, loss in losses.items()}


def model_loss(known: Heads, allocation: Allocation) -> float:
    """The loss of a run of the model, by the formula: the mean over both tasks."""
    losses = predicted(known, allocation)
    return (TEXT * losses["text"] + ANSWER * losses["answer"]) / 2


def refined(
    known: Heads,
    *,
    trials: int = 7,
    total: float = TOTAL,
    ranks: Ranks | None = None,
    **changes: Any,
) -> tuple[list[Allocation], FormulaRun]:
    """Refine where text and answers lose what the curves say, each by its own factor."""

    def formula(calibration: Any, allocation: Allocation, numbers: Any) -> list[TaskLoss]:
        losses = predicted(known, allocation)
        return [
            task("prose", TEXT * losses["text"]),
            task("kv", ANSWER * losses["answer"], answers=3),
        ]

    run = FormulaRun(formula, ranks or Ranks())
    settings: dict[str, Any] = {"seed": 0, "storage": None, "study_name": "cfg", **changes}
    found = refine(cast(Any, run), known, total, cast(Any, None), trials=trials, **settings)
    return found, run


def test_kinds_are_balanced_by_the_ratio_of_a_run_to_the_curves():
    allocation = FEW.allocate(TOTAL, 64)
    losses = predicted(FEW, allocation)
    tasks = (
        task("prose", 2 * losses["text"]),
        task("more", 4 * losses["text"]),
        task("kv", 12 * losses["answer"], answers=2),
    )
    # Three times and twelve times: the geometric mean of both is 1.
    balanced = balance(FEW, Measured(allocation=allocation, tasks=tasks))
    assert balanced == pytest.approx({"text": 0.5, "answer": 2.0})
    far = (
        task("prose", 1e-3 * losses["text"]),
        task("kv", 1e3 * losses["answer"], answers=2),
    )
    balanced = balance(FEW, Measured(allocation=allocation, tasks=far))
    assert balanced == {"text": 1 / 8, "answer": 8.0}


def test_one_kind_has_nothing_to_balance():
    curves = {tail: replace(each, asked=0) for tail, each in FEW.curves.items()}
    known = replace(FEW, curves=curves)
    trial = Measured(allocation=known.allocate(TOTAL, 64), tasks=(task("prose", 1.0),))
    assert balance(known, trial) is None


def test_closed_form_trials_come_first_and_the_best_is_first():
    total = MANY.total(0.15)
    trials, run = refined(MANY, total=total)
    assert len(trials) == 7
    # Equal allocations run once.
    digests = [allocation.digest for _, allocation, _ in run.measured]
    assert len(digests) == len(set(digests)) == len({each.digest for each in trials})
    losses = [model_loss(MANY, allocation) for allocation in trials]
    assert losses == sorted(losses)
    assert all(allocation.cost <= total * (1 + 1e-9) for allocation in trials)
    # The curves' own allocation, of the dense tail that loses least by them; then the balanced one.
    by_tail = {tail: MANY.allocate(total, tail) for tail in TAILS}
    lost = {tail: MANY.predicted(allocation) for tail, allocation in by_tail.items()}
    curves, balanced = (allocation for _, allocation, _ in run.measured[:2])
    assert curves.digest == by_tail[min(lost, key=lambda tail: lost[tail])].digest
    assert curves.prompt_weights == {"text": 1.0, "answer": 1.0}
    assert balanced.prompt_weights == pytest.approx({"text": 0.5, "answer": 2.0})


def test_one_run_is_of_the_curves_and_the_balanced_allocation_is_not_run():
    total = MANY.total(0.15)
    (alone,), run = refined(MANY, trials=1, total=total)
    _, run_of_two = refined(MANY, trials=2, total=total)
    assert len(run.measured) == 1
    curves, balanced = (allocation for _, allocation, _ in run_of_two.measured)
    assert alone.digest == balanced.digest != curves.digest


def test_the_same_seed_gives_the_same_trials_and_another_gives_others():
    def drawn(seed: int) -> list[tuple[str, float]]:
        trials, _ = refined(MANY, total=MANY.total(0.15), seed=seed)
        return [(each.digest, model_loss(MANY, each)) for each in trials]

    assert drawn(0) == drawn(0) != drawn(1)


def test_a_storage_holds_an_ordinary_study_of_these_trials(tmp_path):
    import optuna

    url = f"sqlite:///{tmp_path}/study.db"
    check_storage(url)
    for _ in range(2):
        trials, _ = refined(FEW, trials=4, storage=url)
        study = optuna.load_study(study_name="cfg", storage=url)
        assert len(study.trials) == 4 and study.best_value == pytest.approx(
            model_loss(FEW, trials[0])
        )
        values = sorted(trial.value for trial in study.trials)
        assert values == pytest.approx([model_loss(FEW, each) for each in trials])
        for trial in study.trials:
            assert set(trial.params) == {"group_0", "group_1", "dense_tail"}
    # Another rank leaves the storage alone, and draws the same.
    none = f"sqlite:///{tmp_path}/none.db"
    again, _ = refined(FEW, trials=4, storage=none, ranks=Ranks(1, 2))
    assert [each.digest for each in again] == [each.digest for each in trials]
    assert not (tmp_path / "none.db").exists()


# Each has "secret" and "hidden" in passwords alone.
SECRET_URLS = [
    "nosuch://me:secret@nowhere/db",
    "nosuch://me:secret@hidden@nowhere/db",
    "nosuch://me:secret:hidden@nowhere:3306/db",
    "nosuch://me:secret/hidden?a=b#c@nowhere/db",
    "nosuch://me:secret%40hidden@nowhere/db",
    "nosuch://:secret@nowhere/db",
    "nosuch://me@here.org:secret@nowhere/db",
    "nosuch://me:secret@nowhere/db?a=b&password=secret@hidden",
    "sqlite://me:secret@/db?sslpassword=secrethidden",
    "nosuch://nowhere/db?Passwd=secret%20hidden&a=b",
    "nosuch://nowhere/db?auth_token=secret/hidden",
]


def test_a_storage_that_cannot_be_opened_is_one_line_without_its_password():
    for url in ("study", *SECRET_URLS):
        with pytest.raises(HeadwiseError, match="cannot use the storage") as error:
            check_storage(url)
        said = str(error.value)
        assert "\n" not in said and "secret" not in said and "hidden" not in said


def test_storage_whose_password_has_an_at_sign_is_refused_before_any_connection():
    with pytest.raises(HeadwiseError, match=r"'mysql://me@db:3306/x': .* must be written %40"):
        check_storage("mysql://me:secret@hidden@db:3306/x")


@pytest.mark.parametrize("url", SECRET_URLS)
def test_without_password_shows_no_part_of_a_password(url):
    for word in (url, f"--storage={url}"):
        shown = without_password(word)
        assert "secret" not in shown and "hidden" not in shown and shown.startswith(word[:6])
    assert any("secret" in password for password in passwords(url))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@db:5432/x?timeout=3", "postgresql://me@db:5432/x?timeout=3"),
        ("postgresql://me:s%40cret@db/x", "postgresql://me@db/x"),
        ("postgresql://me@db:5432/x", "postgresql://me@db:5432/x"),
        (
            "postgresql://db/x?user=me&PASSWORD=secret&a=b",
            "postgresql://db/x?user=me&PASSWORD=***&a=b",
        ),
        ("sqlite:///study.db", "sqlite:///study.db"),
        ("sqlite:////home/a:b@c/study.db", "sqlite:////home/a:b@c/study.db"),
        ("passkey@depth=0.5:text.txt", "passkey@depth=0.5:text.txt"),
    ],
)
def test_without_password_keeps_the_rest_of_a_url(url, shown):
    assert without_password(url) == shown
