"""Rounds of an evaluation within a time limit: first the most telling tasks and methods."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from artifacts import Artifact
from profiling.evaluation.config import Evaluation
from profiling.evaluation.intervals import least_units
from profiling.evaluation.measure import Outcome, check_lengths, evaluate
from profiling.evaluation.methods import Methods
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.prompts.settings import TEXT, settings, usual_length

# Model whose order of tasks is taken for a model without settings.
_MEASURED = "smollm2"
# The most telling methods: between random_tiles and oracle_tiles lies what a method can be.
FIRST = ("dense", "headwise", "a_shape", "vertical_slash", "random_tiles", "oracle_tiles")
# Baselines of others, and what the dense tail and keys in place of tiles are worth.
FURTHER = (
    "skip_softmax",
    "top_p_tiles",
    "headwise-tail",
    "oracle",
    "dense+random",
    "dense+omnikv",
)
# Prompts of each round, as multiples of the first round's.
ROUNDS = (1, 2, 4)
# Upper bound of measures per task; each is a comparison.
_COMPARISONS = 4


class Step(NamedTuple):
    """A task at a length under one half of the methods.

    Attributes:
        further: the half in FURTHER.
    """

    task: str
    length: int
    further: bool


def places_of(
    artifact: Artifact, tasks: Sequence[str], lengths: Sequence[int]
) -> tuple[list[tuple[str, int]], list[str]]:
    """List tasks with lengths, the most telling first, and those left out as served densely.

    Raises:
        HeadwiseError: a length that was asked for, or every one, is shorter than the artifact
            serves sparsely.
    """
    known = [each for each in settings(artifact.model.name) if each.asked]
    if not tasks and not lengths and known:
        places = [(TEXT, usual_length(known)), *((each.task, each.length) for each in known)]
        least = artifact.prefill.dense_below
        left = [
            f"{task} at {length} tokens, which the artifact serves densely"
            for task, length in places
            if length < least
        ]
        kept = [(task, length) for task, length in places if length >= least]
        if kept:
            return kept, left
    lengths = lengths or [artifact.model.max_positions]
    check_lengths(artifact, lengths)
    tasks = tasks or [TEXT, *(each.task for each in known or settings(_MEASURED))]
    return [(task, length) for task in tasks for length in lengths], []


class Rounds:
    """Outcomes by step, and the prompts of each seed that every step has had."""

    def __init__(
        self,
        config: Evaluation,
        loaded: LoadedModel,
        methods: Methods,
        ledger: Ledger,
        end: float,
    ) -> None:
        """Prepare rounds; run them with `run`.

        Args:
            config: methods and seeds; tasks and lengths are those of each step.
            end: of time.monotonic().
        """
        self._config = config
        self._loaded = loaded
        self._methods = methods
        self._ledger = ledger
        self._end = end
        self._seconds: dict[Step, float] = {}
        self._outcomes: dict[Step, list[Outcome]] = {}
        self.prompts: dict[Step, int] = {}

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes of all steps, each of its last round."""
        return [outcome for outcomes in self._outcomes.values() for outcome in outcomes]

    def run(self, places: Sequence[tuple[str, int]]) -> list[str]:
        """Run what fits the time; return what did not, in words."""
        names = self._config.methods
        seeds = self._config.seeds
        further = tuple(name for name in names if name in FURTHER)
        steps = [Step(*place, False) for place in places]
        if further:
            steps += [Step(*place, True) for place in places]
        lengths = {length for _, length in places}
        comparisons = _COMPARISONS * (len(names) - 1) * (len(places) + len(lengths))
        first = -(-least_units(comparisons) // seeds)
        left = []
        for samples in (times * first for times in ROUNDS):
            for step in steps:
                if self.prompts and time.monotonic() + self._expected(step, samples) > self._end:
                    if step.further:
                        under = f" under {', '.join(further)}"
                    else:
                        under = ""
                    left.append(
                        f"{step.task} at {step.length} tokens, {samples * seeds} prompts{under}"
                    )
                else:
                    self._run(step, samples)
        return left

    def _expected(self, step: Step, samples: int) -> float:
        """Estimate seconds for the missing prompts; a new step is taken for the slowest so far."""
        each = self._seconds.get(step, max(self._seconds.values()))
        return each * (samples - self.prompts.get(step, 0))

    def _run(self, step: Step, samples: int) -> None:
        start = time.monotonic()
        names = tuple(name for name in self._config.methods if (name in FURTHER) == step.further)
        asked = replace(
            self._config, tasks=(step.task,), lengths=(step.length,), methods=names, samples=samples
        )
        self._outcomes[step] = evaluate(asked, self._loaded, self._methods, self._ledger)
        new = samples - self.prompts.get(step, 0)
        self._seconds[step] = (time.monotonic() - start) / new
        self.prompts[step] = samples
