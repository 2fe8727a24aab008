"""A sampler whose draws depend on the seed and a trial's place, and not on which process draws or was killed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from search.claims import KEY


class PlacedSampler(BaseSampler):
    """A new sampler for each trial, seeded by the search's seed and the trial's place.

    What a sampler knows is in the study's trials, so nothing is lost with the one before. Genetic samplers also keep
    their populations in the study: theirs are other draws after an interruption.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make = make
        self._seed = seed
        self._current = make(seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        words = np.random.SeedSequence([self._seed, int(trial.user_attrs[KEY])]).generate_state(1)
        self._current = self._make(int(words[0]))
        self._current.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        return self._current.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, space: dict[str, Any]) -> dict[str, Any]:
        return self._current.sample_relative(study, trial, space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, name: str, distribution: Any) -> Any:
        return self._current.sample_independent(study, trial, name, distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._current.after_trial(study, trial, state, values)


def tpe(seed: int) -> BaseSampler:
    """Optuna's tree-structured Parzen estimator over all parameters jointly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # The liar keeps several processes from trying the same place at once.
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
