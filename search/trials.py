"""Trials of an Optuna study that several processes share: a total over all of them, however often they are killed.

A trial has a place, 0, 1, 2, ...: the first places are the baselines, and at each of the others the sampler draws from
a generator of its own, seeded by the search's seed and the place. So one process gives the same trials however often
it was killed in between, and several never draw the same.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from search.alive import STALE_SECONDS
from search.claims import ERROR, Claims, Survey
from search.sampler import PlacedSampler, tpe
from search.study import succeeded
from search.workers import check_starter, is_worker

Objective = Callable[[optuna.Trial], Sequence[float]]
_POLL_SECONDS = 0.5
# An objective that fails this often in a row, fails.
_FAILURES = 3


def run_trials(
    study: optuna.Study,
    objective: Objective,
    *,
    n_trials: int,
    timeout: float | None = None,
    seed: int = 0,
    baselines: Sequence[Mapping[str, Any]] = (),
    sampler: Callable[[int], BaseSampler] | None = None,
    callbacks: Sequence[Callable[[optuna.Study, FrozenTrial], None]] = (),
    progress: bool | None = None,
    stale: float = STALE_SECONDS,
) -> list[FrozenTrial]:
    """Run trials beside other processes until there are `n_trials` in all, or the time is over.

    Args:
        study: as open_study returns it.
        objective: from a trial to its values, one a direction of the study.
        n_trials: in total over all processes and restarts, baselines included; at least those are run.
        timeout: seconds after which this process starts no trial; what others had begun by then is waited for.
        seed: of the sampler.
        baselines: parameters of the first trials.
        sampler: from a seed to a sampler (see PlacedSampler); TPE if None.
        callbacks: called with the study and each trial that this process finished.
        progress: whether to show a bar; None shows it on a terminal, in the first process only.
        stale: seconds without a sign of life after which a process counts as gone.

    Returns:
        The trials that succeeded, by place.

    Raises:
        HeadwiseError: raised by the objective, or there is no trial that succeeded.
        Exception: what the objective raised, when it did so three times in a row.
    """
    study.sampler = PlacedSampler(sampler or tpe, seed)
    run = _Run(study, objective, baselines, callbacks, stale)
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    total = max(n_trials, len(baselines))
    disable = None if progress is None and not is_worker() else not progress
    with tqdm(total=total, desc="trials", unit="trial", disable=disable) as bar, run.claims.working():
        try:
            run.until(total, deadline, bar)
        except KeyboardInterrupt:
            if not is_worker():
                line = f"{run.finished} of {total} trials are finished; the same command goes on from there"
                tqdm.write(line, sys.stderr)
            raise
    found = succeeded(study)
    if not found:
        raise HeadwiseError("no trial succeeded" + ("" if timeout is None else f" within {timeout:g} s"))
    return found


class _Run:
    """What this process does for a study."""

    def __init__(
        self,
        study: optuna.Study,
        objective: Objective,
        baselines: Sequence[Mapping[str, Any]],
        callbacks: Sequence[Callable[[optuna.Study, FrozenTrial], None]],
        stale: float,
    ) -> None:
        self.claims = Claims(study._storage, study.study_name, stale=stale)
        self.finished = 0
        self._study = study
        self._objective = objective
        self._baselines = baselines
        self._callbacks = callbacks
        self._failures = 0
        self._told: set[str] = set()

    def until(self, total: int, deadline: float, bar: tqdm[Any]) -> None:
        """Work until the places below `total` are done, or until what had begun by the deadline is."""
        awaited: set[int] | None = None
        while True:
            check_starter()
            survey = self.claims.survey()
            done = [place for place in range(total) if str(place) in survey.done]
            self.finished = len(done)
            bar.update(self.finished - bar.n)
            self._tell_failures(survey)
            if self.finished == total:
                return
            if time.monotonic() >= deadline:
                busy = {trial.number for trial in survey.busy.values()}
                awaited = busy if awaited is None else awaited & busy
                if not awaited:
                    return
            free = [p for p in range(total) if str(p) not in survey.done and str(p) not in survey.busy]
            if free and awaited is None:
                self._try(free[0])
            else:
                time.sleep(_POLL_SECONDS)

    def _try(self, place: int) -> None:
        fixed = self._baselines[place] if place < len(self._baselines) else None
        trial_id = self.claims.take(str(place), fixed_params=fixed)
        if trial_id is None:
            return
        trial = optuna.Trial(self._study, trial_id)
        try:
            values = self._values(trial)
            if values is not None:
                self._study.tell(trial, values, skip_if_finished=True)
        except optuna.exceptions.UpdateFinishedTrialError:
            # This process stood still, and others took it for gone: the trial is theirs.
            return
        except BaseException:
            self.claims.give_up(trial_id)
            raise
        if values is not None:
            self._failures = 0
        for callback in self._callbacks:
            callback(self._study, self._study._storage.get_trial(trial_id))

    def _values(self, trial: optuna.Trial) -> list[float] | None:
        """What the objective says; None if it failed, which is recorded then."""
        try:
            values = [float(value) for value in self._objective(trial)]
            if not all(math.isfinite(value) for value in values):
                raise ArithmeticError(f"values must be finite, got {values}")
        except (HeadwiseError, optuna.exceptions.UpdateFinishedTrialError):
            raise
        except Exception as error:
            self._failures += 1
            if self._failures == _FAILURES:
                raise
            trial.set_user_attr(ERROR, shorten(one_line(f"{type(error).__name__}: {error}"), 300))
            self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            return None
        return values

    def _tell_failures(self, survey: Survey) -> None:
        for key, trial in survey.done.items():
            if trial.state == TrialState.FAIL and key not in self._told and not is_worker():
                self._told.add(key)
                tqdm.write(f"trial {key} failed: {trial.user_attrs[ERROR]}", sys.stderr)
