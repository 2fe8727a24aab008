"""Refinement: ways to spend one budget are run on the whole model, on the calibration prompts.

Curves take heads one at a time on dense inputs. A first run with the patterns shows how far the
loss of each kind of prompt is from the sum of the curves. That gives in closed form how the kinds
weigh against each other. Optuna then draws weights of groups of layers and dense tails around it,
all at the budget that was asked for."""

from __future__ import annotations

import re

import numpy as np

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.progress import Phase, phase
from profiling.quality.sequences import Reference
from search.model.allocation import Allocation, Heads
from search.model.config import passwords, without_password
from search.model.search_run import Measured, SearchRun
from search.model.task_losses import TaskLoss

_GROUPS = 6
# Weights are powers of two; curves alone are near the best, so trials stay near equal weights.
_REACH = 1.0
# How far the first run may move the balance between kinds of prompts.
_MOST = 8.0


def refine(
    run: SearchRun,
    heads: Heads,
    total: float,
    calibration: Reference,
    *,
    trials: int,
    seed: int,
    storage: str | None,
    study_name: str,
) -> list[Allocation]:
    """Try ways to spend the budget; the best one first, equals in the order of their trials.

    Args:
        run: the search.
        heads: curves and costs.
        total: the budget.
        calibration: the prompts to measure on.
        trials: in all, those in closed form included. With one, the balanced allocation is
            returned without a run of its own.
        seed: of the draws.
        storage: of Optuna's study; None is memory.
        study_name: its name there.
    """
    tails = [tail for tail in sorted(heads.curves) if heads.least(tail) < total]
    # By the curves alone: the dense tail that loses least for the budget comes first.
    by_tail = sorted((heads.allocate(total, tail) for tail in tails), key=heads.predicted)
    quiet = not run.ranks.is_first
    with phase("refinement", trials, "trials", quiet=quiet) as shown:
        done = _Trials(run, calibration, shown)
        first = done.measure(by_tail[0])
        prompt_weights = balance(heads, first)
        if prompt_weights is not None:
            balanced = heads.allocate(total, first.allocation.tail, prompt_weights=prompt_weights)
            if trials == 1:
                return [balanced]
            done.measure(balanced)
        if trials > len(done.measured):
            if quiet:
                storage = None
            _draw(done, heads, total, tails, trials, seed, storage, study_name)
    return [trial.allocation for trial in sorted(done.measured, key=lambda trial: trial.loss)]


def check_storage(url: str | None) -> None:
    """Raise HeadwiseError where Optuna cannot open this storage; the error shows no password."""
    if url is None:
        return
    import optuna

    shown = f"cannot use the storage {without_password(url)!r}"
    if re.search("://(?!/)[^:@]*:[^@]*@[^?]*@", url):
        # SQLAlchemy would look up the rest of the password as a host.
        raise HeadwiseError(f"{shown}: its password has an @, which must be written %40")
    try:
        optuna.get_all_study_summaries(url)
    # Whatever the database's driver raises, one that is missing included.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for password in passwords(url):
            reason = reason.replace(password, "***")
        raise HeadwiseError(
            f"{shown}: {shorten(reason)}; it is a URL such as sqlite:///study.db"
        ) from None


def balance(heads: Heads, trial: Measured) -> dict[str, float] | None:
    """Weights of the kinds of prompts with which the curves predict the trial's losses.

    None with one kind."""
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


class _Trials:
    """Allocations measured on the calibration prompts, in order; equal ones run once."""

    def __init__(self, run: SearchRun, calibration: Reference, shown: Phase) -> None:
        self.measured: list[Measured] = []
        self._run = run
        self._calibration = calibration
        self._shown = shown

    def measure(self, allocation: Allocation) -> Measured:
        """Measure an allocation and add it."""
        tasks = self._known(allocation)
        if tasks is None:
            tasks = self._run.measure(self._calibration, [allocation])[0].tasks
        trial = Measured(allocation=allocation, tasks=tasks)
        self.measured.append(trial)
        self._shown.reach(len(self.measured))
        return trial

    def _known(self, allocation: Allocation) -> tuple[TaskLoss, ...] | None:
        for trial in self.measured:
            if trial.allocation.digest == allocation.digest:
                return trial.tasks
        return None


def _draw(
    done: _Trials,
    heads: Heads,
    total: float,
    tails: list[int],
    trials: int,
    seed: int,
    storage: str | None,
    study_name: str,
) -> None:
    """Draw the other trials: weights of layer groups, and the dense tail. All ranks draw alike."""
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    prompt_weights = min(done.measured, key=lambda trial: trial.loss).allocation.prompt_weights
    groups = np.array_split(np.flatnonzero(heads.searched), min(_GROUPS, int(heads.searched.sum())))
    space: dict[str, BaseDistribution] = {"dense_tail": CategoricalDistribution(tails)}
    for number in range(len(groups)):
        space[f"group_{number}"] = FloatDistribution(-_REACH, _REACH)
    sampler = optuna.samplers.TPESampler(
        seed=seed, multivariate=True, n_startup_trials=len(done.measured) + 2
    )
    if storage is not None:
        summaries = optuna.get_all_study_summaries(storage)
        if study_name in [summary.study_name for summary in summaries]:
            # The resume file has what was measured; the study is written again from the start.
            optuna.delete_study(study_name=study_name, storage=storage)
    study = optuna.create_study(
        study_name=study_name, storage=storage, sampler=sampler, direction="minimize"
    )
    for trial in done.measured:
        params = dict.fromkeys(space, 0.0) | {"dense_tail": trial.allocation.tail}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=space, value=trial.loss)
        )
    while len(done.measured) < trials:
        drawn = study.ask(space)
        weight = np.ones(len(heads.searched))
        for number, layers in enumerate(groups):
            weight[layers] = 2.0 ** drawn.params[f"group_{number}"]
        allocation = heads.allocate(
            total, drawn.params["dense_tail"], weight=weight, prompt_weights=prompt_weights
        )
        study.tell(drawn, done.measure(allocation).loss)
