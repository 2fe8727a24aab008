"""Who works on what: the parts of a study's work by key, each a trial that one process claims.

A process claims a key by adding a running trial for it and looking whether an older one stands: numbers are given out
one after the other in every storage, so of two that claim together one sees the other. What a process that is gone had
claimed is free again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from artifacts import HeadwiseError
from search.alive import STALE_SECONDS, Alive

KEY = "key"
WORKER = "worker"
# What made a trial fail; a trial that was only given up has none.
ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Finished trials and those that are being worked on, by key; a finished one may have failed."""

    done: dict[str, FrozenTrial]
    busy: dict[str, FrozenTrial]


class Claims:
    """The keys of one study."""

    def __init__(self, storage: BaseStorage, study_name: str, *, stale: float = STALE_SECONDS) -> None:
        self._storage = storage
        self._study_name = study_name
        self._study_id = storage.get_study_id_from_name(study_name)
        self._alive = Alive(storage, self._study_id, stale=stale)

    @property
    def me(self) -> str:
        """Tells this process from others."""
        return self._alive.me

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """What is claimed inside the block stays claimed while this process lives."""
        with self._alive.beating():
            yield

    def survey(self) -> Survey:
        """What is done and what is being worked on; trials whose process is gone are given up."""
        trials = self._trials()
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        gone = self._alive.gone({_owner(trial) for trial in running})
        done: dict[str, FrozenTrial] = {}
        busy: dict[str, FrozenTrial] = {}
        for trial in trials:
            key = trial.user_attrs[KEY]
            if _ended(trial):
                done.setdefault(key, trial)
            elif trial.state == TrialState.RUNNING:
                if _owner(trial) in gone:
                    self.give_up(trial._trial_id)
                else:
                    busy.setdefault(key, trial)
        return Survey(done=done, busy={key: trial for key, trial in busy.items() if key not in done})

    def take(self, key: str, *, fixed_params: Mapping[str, Any] | None = None) -> int | None:
        """Claim a key; the trial's id, or None if another process came first."""
        system_attrs = {} if fixed_params is None else {"fixed_params": dict(fixed_params)}
        trial_id: int = self._storage.create_new_trial(
            self._study_id,
            template_trial=optuna.trial.create_trial(
                state=TrialState.RUNNING, user_attrs={KEY: key, WORKER: self._alive.me}, system_attrs=system_attrs
            ),
        )
        for trial in self._trials():
            if trial._trial_id == trial_id:
                return trial_id
            if trial.user_attrs[KEY] == key and (trial.state == TrialState.RUNNING or _ended(trial)):
                break
        self.give_up(trial_id)
        return None

    def give_up(self, trial_id: int) -> None:
        """Free what a trial claims; one that has finished meanwhile is left as it is."""
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial_id, state=TrialState.FAIL)

    def finish(self, trial_id: int, state: TrialState, values: list[float] | None, told: Mapping[str, Any]) -> bool:
        """Record how a trial ended, with attributes; False if others had given it up by then."""
        try:
            for name, value in told.items():
                self._storage.set_trial_user_attr(trial_id, name, value)
            self._storage.set_trial_state_values(trial_id, state=state, values=values)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    def trial(self, trial_id: int) -> FrozenTrial:
        """A trial as it stands in the storage."""
        return self._storage.get_trial(trial_id)

    def _trials(self) -> list[FrozenTrial]:
        try:
            # SQLite gives the number of a study that was discarded to the next one, whose settings are others.
            same = self._storage.get_study_id_from_name(self._study_name) == self._study_id
            trials = self._storage.get_all_trials(self._study_id, deepcopy=False) if same else None
        except KeyError:
            trials = None
        if trials is None:
            raise HeadwiseError("the study is gone: another process discarded it (--fresh)")
        return [trial for trial in trials if KEY in trial.user_attrs]


def _ended(trial: FrozenTrial) -> bool:
    """Whether a trial came to an end, good or bad, and was not only given up."""
    return trial.state == TrialState.COMPLETE or (trial.state == TrialState.FAIL and ERROR in trial.user_attrs)


def _owner(trial: FrozenTrial) -> str:
    return str(trial.user_attrs.get(WORKER))
