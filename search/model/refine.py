"""Refinement: how one budget is spent, by what it does to the whole model's predictions on the
calibration prompts.

Curves take heads one at a time on dense inputs. A first run with the patterns shows how far each
kind of prompt's loss is from what the curves add up to, and so, in closed form, how the kinds weigh
against each other. That may be run as well, and Optuna then tries weights of groups of layers and
dense tails around it, all at the budget that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import HeadwiseError
from artifacts.errors import shorten
from search.model.allocation import Allocation, Heads
from search.model.config import without_password
from search.model.task_losses import TaskLoss

_GROUPS = 6
# Weights are powers of two; curves alone are near the best, so trials stay near equal weights.
_REACH = 1.0
# How far the first run may move the balance between kinds of prompts.
_MOST = 8.0

Measure = Callable[[Sequence[Allocation]], list[list[TaskLoss]]]
"""What allocations lose on the calibration prompts, by task."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One way of spending the budget, and what it loses on the calibration prompts, or, where not
    run, is to lose."""

    name: str
    allocation: Allocation
    tasks: tuple[TaskLoss, ...]

    @property
    def loss(self) -> float:
        """Mean over the tasks, nats a token."""
        return float(np.mean([task.loss for task in self.tasks]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Refinement:
    """What refinement is asked to do. trials: in all, the closed-form ones included. storage:
    Optuna's; None is memory.

    name: of the study. quiet: this rank is not the one that writes the study.
    """

    heads: Heads
    total: float
    trials: int
    seed: int
    storage: str | None
    name: str
    quiet: bool


def refine(
    asked: Refinement, measure: Measure, done: Callable[[int], object] = lambda count: None
) -> list[Trial]:
    """The trials, the best one first; those with equal losses keep the order in which they were
    made."""
    heads = asked.heads
    total = asked.total
    tails = [tail for tail in sorted(heads.curves) if heads.least(tail) < total]
    # By the curves alone: the dense tail that loses least for the budget comes first.
    by_tail = sorted((heads.by_model(total, tail) for tail in tails), key=heads.predicted)
    found: list[Trial] = []

    def tried(name: str, allocation: Allocation) -> Trial:
        known = next((one for one in found if one.allocation.digest == allocation.digest), None)
        tasks = known.tasks if known else tuple(measure([allocation])[0])
        trial = Trial(name=name, allocation=allocation, tasks=tasks)
        found.append(trial)
        done(len(found))
        return trial

    first = tried("curves", by_tail[0])
    balance = balanced(heads, first)
    if balance is not None:
        weighed = heads.by_model(total, first.allocation.tail, kinds=balance)
        if asked.trials == 1:
            return [
                Trial(name="balanced", allocation=weighed, tasks=foreseen(heads, first, weighed))
            ]
        tried("balanced", weighed)
    if asked.trials > len(found):
        _study(asked, tried, found, tails)
    return sorted(found, key=lambda trial: trial.loss)


def check_storage(url: str | None) -> None:
    """Raise HeadwiseError where Optuna cannot open this storage."""
    if url is None:
        return
    import optuna

    try:
        optuna.get_all_study_summaries(url)
    # Whatever the database's driver raises, one that is missing included.
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadwiseError(
            f"cannot use the storage {without_password(url)!r}: {shorten(why)}; it is a URL such "
            f"as sqlite:///study.db"
        ) from None


def balanced(heads: Heads, trial: Trial) -> dict[str, float] | None:
    """Weights of the kinds of prompts for which the curves predict what the trial measured; None
    with one kind."""
    predicted = heads.predicted_by_kind(trial.allocation)
    if len(predicted) < 2:
        return None
    measured = {
        "text": [task.loss for task in trial.tasks if not task.answers],
        "answer": [task.loss for task in trial.tasks if task.answers],
    }
    factors = {
        kind: float(np.mean(measured[kind])) / max(loss, 1e-12) for kind, loss in predicted.items()
    }
    middle = float(np.exp(np.mean([np.log(max(factor, 1e-12)) for factor in factors.values()])))
    return {
        kind: float(np.clip(factor / middle, 1 / _MOST, _MOST)) for kind, factor in factors.items()
    }


def foreseen(heads: Heads, trial: Trial, other: Allocation) -> tuple[TaskLoss, ...]:
    """What another allocation is to lose: what the trial measured, times what the curves say of its
    kind of prompts."""
    here = heads.predicted_by_kind(trial.allocation)
    there = heads.predicted_by_kind(other)
    times = {kind: there[kind] / max(here[kind], 1e-12) for kind in here}
    return tuple(task.times(times["answer" if task.answers else "text"]) for task in trial.tasks)


def _study(
    asked: Refinement,
    tried: Callable[[str, Allocation], Trial],
    found: list[Trial],
    tails: list[int],
) -> None:
    """Draw the other trials: weights of groups of layers and the dense tail. Every rank's study
    draws alike."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    heads = asked.heads
    kinds = min(found, key=lambda trial: trial.loss).allocation.kinds
    groups = np.array_split(np.flatnonzero(heads.searched), min(_GROUPS, int(heads.searched.sum())))
    space: dict[str, BaseDistribution] = {"dense_tail": CategoricalDistribution(tails)}
    space |= {
        f"group_{number}": FloatDistribution(-_REACH, _REACH) for number in range(len(groups))
    }
    sampler = optuna.samplers.TPESampler(
        seed=asked.seed, multivariate=True, n_startup_trials=len(found) + 2
    )
    storage = None if asked.quiet else asked.storage
    if storage is not None and asked.name in [
        study.study_name for study in optuna.get_all_study_summaries(storage)
    ]:
        # What was measured is in the ledger; the study is written again from the start.
        optuna.delete_study(study_name=asked.name, storage=storage)
    study = optuna.create_study(
        study_name=asked.name, storage=storage, sampler=sampler, direction="minimize"
    )
    for trial in found:
        params = dict.fromkeys(space, 0.0) | {"dense_tail": trial.allocation.tail}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=space, value=trial.loss)
        )
    while len(found) < asked.trials:
        drawn = study.ask(space)
        weight = np.ones(len(heads.searched))
        for number, layers in enumerate(groups):
            weight[layers] = 2.0 ** drawn.params[f"group_{number}"]
        allocation = heads.by_model(
            asked.total, drawn.params["dense_tail"], weight=weight, kinds=kinds
        )
        study.tell(drawn, tried(f"trial {len(found)}", allocation).loss)
