"""The phases of a search with one budget for the model, as every process that takes part runs them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from optuna.storages import BaseStorage

from artifacts import Artifact, Calibration, HeadwiseError, ModelInfo
from kernels.patterns import Pattern
from profiling.models.loading import LoadedModel
from profiling.prompts.held_out import SETS, held_out
from profiling.prompts.prompt import Prompt, digest, parse_task
from profiling.quality.logits import DenseLogits
from search.attention_time import fit_to_layers, one_of_each_task
from search.costs import Costs
from search.curves import Curves, score_prompt
from search.gate_rounds import Judges, Point, Raised, raise_until, thinned
from search.model_record import Outcome, build_artifact, describe
from search.refine import NothingFound, Problem, baselines, front, objective, parameters
from search.settle import by_head
from search.shared_drifts import SharedDrifts
from search.study import finish, open_study, succeeded
from search.trials import run_trials
from search.units import Units
from search.workers import is_worker

if TYPE_CHECKING:
    from search.model_budget import ModelSearch

# Curves of each set of held-out prompts, and how settlements do on it: each judges what the one before decided.
JUDGES = tuple(f"judges_{number}" for number in range(SETS))
DRIFTS = tuple(f"drifts_{number}" for number in range(SETS))
# What a search keeps in its storage, each under the artifact's name.
STUDIES = ("curves", "times", "trials", *JUDGES, *DRIFTS)
# Raised where what is measured of a prompt changes: what a storage has of before is of another search.
_CURVES = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Phases:
    """What the phases share.

    prompts: for calibration, by `length/task/number`. held_out: of the longest length. candidates: by length.
    backend: that serves.
    """

    config: ModelSearch
    loaded: LoadedModel
    model: ModelInfo
    prompts: Mapping[str, Prompt]
    held_out: Sequence[Prompt]
    candidates: Mapping[int, tuple[Pattern, ...]]
    costs: Costs
    backend: str
    storage: BaseStorage

    def run(self) -> Outcome | None:
        """All phases; None in a copy, which leaves what is told and written to the process that started it."""
        config = self.config
        logits = DenseLogits(self.loaded.model, self._calibration, at_once=False)
        curves = self._curves(idle=logits.learn)
        problem, costs = self._problem(curves[self._longest])
        settings = {
            **self._settings,
            "budget": config.budget,
            "cost": config.cost,
            "table": costs.identity,
            "fit": [costs.scale, costs.overhead],
            "seed": config.seed,
        }
        study = open_study(self.storage, self._name("trials"), settings, directions=("minimize", "minimize"))
        # They are no part of a trial: neither of its time nor of what it can fail of.
        while len(succeeded(study)) < max(config.n_trials, len(baselines())) and logits.learn():
            pass
        trials = run_trials(
            study,
            objective(problem, self.loaded.model, logits),
            n_trials=config.n_trials,
            timeout=config.timeout,
            seed=config.seed,
            baselines=baselines(),
        )
        del logits
        # Where the gate lets nothing pass, another budget is another search, by the same curves.
        finish(study)
        try:
            raised, uniform = self._gate(problem, trials)
        except NothingFound:
            if is_worker():
                # Whoever started this finds that out as well, and tells.
                return None
            raise
        if is_worker():
            return None
        if raised.fault is not None:
            more = max(raised.chosen.settlement.cost, problem.total) / problem.total
            print(
                f"the gate: {raised.fault}; by those prompts too, {more:.2f} times the budget passes", file=sys.stderr
            )
        return Outcome(
            problem=problem,
            costs=costs,
            curves=curves,
            candidates=self.candidates,
            raised=raised,
            uniform=uniform,
            trials=len(trials),
            calibration=self._about_prompts(),
            loaded=self.loaded,
        )

    def write(self, outcome: Outcome) -> Artifact:
        """What a search came to, timed and written; no copy should be at work any more."""
        return build_artifact(self._about(), outcome)

    @property
    def _longest(self) -> int:
        return max(self.candidates)

    @property
    def _calibration(self) -> list[Prompt]:
        return [prompt for key, prompt in self.prompts.items() if key.startswith(f"{self._longest}/")]

    @property
    def _settings(self) -> dict[str, Any]:
        """All that curves depend on. Of files it holds names and contents, for paths differ between machines."""
        config, calibration = self.config, self._about_prompts()
        return {
            "curves": _CURVES,
            "model": self.model.name,
            "weights": self.model.weights_sha256,
            "prompts": calibration.sha256,
            "tasks": list(calibration.tasks),
            "lengths": list(calibration.lengths),
            "dtype": config.dtype,
            "device": config.device,
            "backend": self.backend,
            "dense tail": config.dense_tail,
            "candidates": hashlib.sha256(repr(sorted(self.candidates.items())).encode()).hexdigest()[:16],
        }

    def _name(self, what: str) -> str:
        return f"{self.config.out.stem}.{what}"

    def _curves(self, *, idle: Callable[[], bool]) -> dict[int, Curves]:
        """By length, the means over its prompts. idle: what to do while others have the last of them in hand."""
        units = Units(self.storage, self._name("curves"), list(self.prompts), self._settings)
        for key in units.claim(description="prompts", idle=idle):
            units.put(key, asdict(self._score(self.prompts[key], int(key.partition("/")[0]))))
        # Their settings are in the trials' too: a search with others is stopped there, where it has unfinished trials.
        units.finish()
        found = {key: Curves(**arrays) for key, arrays in units.results().items()}
        curves = {
            length: Curves.mean([one for key, one in found.items() if key.startswith(f"{length}/")])
            for length in self.candidates
        }
        if not curves[self._longest].searched.any():
            raise HeadwiseError(f"every layer of {self.model.name} slides over a window already: nothing to search")
        return curves

    def _score(self, prompt: Prompt, length: int) -> Curves:
        return score_prompt(
            self.loaded,
            prompt,
            self.candidates[length],
            layers=self.model.num_layers,
            dense_tail=self.config.dense_tail,
            backend=self.config.backend,
        )

    def _problem(self, curves: Curves) -> tuple[Problem, Costs]:
        """What is to be spent on what; the table's seconds are brought to those of this model's layers first."""
        problem = self._problem_at(self.costs, curves)
        settings = {**self._settings, "budget": self.config.budget, "table": self.costs.identity}
        timing = Units(self.storage, self._name("times"), ["fit"], settings)
        # A search with other settings may begin where this is cut off: nothing of it would be lost.
        timing.finish()
        for key in timing.claim(progress=False):
            fit = 1.0, 0.0
            # What this machine takes says nothing of a table that another one was measured for.
            if self.costs.of_machine(self.config.device):
                prompts = one_of_each_task(self._calibration, self.config.samples)
                fit = fit_to_layers(self.loaded, problem, prompts, backend=self.config.backend)
            timing.put(key, fit)
        scale, overhead = timing.results()["fit"]
        costs = self.costs.brought_to(scale=scale, overhead=overhead)
        problem = self._problem_at(costs, curves)
        if problem.total <= problem.least * 1.01:
            share = problem.least / problem.total * self.config.budget
            raise HeadwiseError(
                f"--budget {self.config.budget:g} is impossible at {self._longest} tokens: the cheapest candidates "
                f"cost {share:.3f} of all of attention; ask for a good deal more, or for a longer --length"
            )
        return problem, costs

    def _problem_at(self, costs: Costs, curves: Curves) -> Problem:
        candidates = self.candidates[self._longest]
        each = costs.of(candidates, curves.tiles)
        problem = Problem(
            model=self.model,
            candidates=candidates,
            curves=curves,
            costs=each,
            total=self.config.budget * costs.all_keys() * int(curves.searched.sum()) * each.shape[1],
            dense_tail=self.config.dense_tail,
            describe=lambda settlement: describe(self._about(), self._about_prompts(), settlement, problem),
        )
        return problem

    def _about(self) -> Any:
        return replace(self.config, backend=self.backend)

    def _about_prompts(self) -> Calibration:
        return Calibration(
            tasks=tuple(dict.fromkeys(parse_task(task).name for task in self.config.tasks)),
            lengths=tuple(self.candidates),
            samples=self.config.samples,
            sha256=digest(list(self.prompts.values())),
        )

    def _gate(self, problem: Problem, trials: Sequence[Any]) -> tuple[Raised, Point]:
        """Held-out prompts decide what is served; with it the same budget, or what it came to, as one for each head."""
        settlements = thinned([problem.settle(parameters(1, trial.params)) for trial in front(trials)], problem.total)
        judges = self._judges(problem)
        first = next(judges)
        # All that will most likely be asked for: where it is told at once, processes wait for each other once.
        first.drifts([*settlements, by_head(problem.curves, problem.costs, problem.total)])
        raised = raise_until(problem, settlements, chain([first], judges), self.config.limits)
        total = max(raised.chosen.settlement.cost, problem.total)
        uniform = by_head(problem.curves, problem.costs, total)
        return raised, Point(settlement=uniform, drift=raised.judges.drifts([uniform])[0])

    def _judges(self, problem: Problem) -> Iterator[Judges]:
        """The prompts that were held out, then others, each set unlike those before, as far as texts have any."""
        config, prompts, seen = self.config, self.held_out, list(self.prompts.values())
        for number in range(SETS):
            if number:
                seen = [*seen, *prompts]
                how: dict[str, Any] = {"length": self._longest, "samples": config.samples, "seed": config.seed}
                try:
                    prompts = held_out(config.tasks, self.loaded.tokenizer, **how, seen=seen, number=number)
                except HeadwiseError:
                    return
            settings = {**self._settings, "held out": digest(prompts)}
            units = partial(self._units, DRIFTS[number], settings)
            yield Judges(
                prompts=prompts,
                drifts=SharedDrifts(problem, self.loaded.model, prompts, units),
                curves=partial(self._curves_of_judges, number, prompts, settings),
            )

    def _units(self, what: str, settings: Mapping[str, Any], keys: Sequence[str]) -> Units:
        return Units(self.storage, self._name(what), keys, settings)

    def _curves_of_judges(self, number: int, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> Curves:
        """The means over one of the held-out sets."""
        units = self._units(JUDGES[number], settings, [str(i) for i in range(len(prompts))])
        units.finish()
        for key in units.claim(description="held-out prompts"):
            units.put(key, asdict(self._score(prompts[int(key)], self._longest)))
        return Curves.mean([Curves(**arrays) for arrays in units.results().values()])
