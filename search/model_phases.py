"""The phases of a search with one budget for the model, as every process that takes part runs them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from optuna.storages import BaseStorage

from artifacts import Artifact, Calibration, HeadwiseError, ModelInfo
from kernels.patterns import Pattern
from profiling.held_out import SETS, held_out
from profiling.logits import DenseLogits
from profiling.models import LoadedModel
from profiling.prompts import Prompt, digest, parse_task
from search.attention_time import measure_scale
from search.costs import Costs
from search.curves import Curves, score_prompt
from search.gate_rounds import Judges, raise_until
from search.model_record import Outcome, build_artifact, describe
from search.refine import Problem, baselines, front, objective, parameters
from search.settle import by_head
from search.study import finish, open_study
from search.trials import run_trials
from search.units import Units
from search.workers import is_worker

if TYPE_CHECKING:
    from search.model_budget import ModelSearch

# What is known of each set of held-out prompts: each judges what the one before decided.
JUDGES = tuple(f"judges_{number}" for number in range(SETS))
# What a search keeps in its storage, each under the artifact's name.
STUDIES = ("curves", "times", "trials", *JUDGES)
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

    def run(self) -> Artifact | None:
        """All phases; None in a copy, which leaves the last one to the process that started it."""
        config = self.config
        curves = self._curves()
        problem, costs = self._problem(curves[self._longest])
        settings = {
            **self._settings,
            "budget": config.budget,
            "cost": config.cost,
            "table": costs.identity,
            "scale": round(costs.scale, 12),
            "seed": config.seed,
        }
        study = open_study(self.storage, self._name("trials"), settings, directions=("minimize", "minimize"))
        trials = run_trials(
            study,
            objective(problem, self.loaded.model, DenseLogits(self.loaded.model, self._calibration)),
            n_trials=config.n_trials,
            timeout=config.timeout,
            seed=config.seed,
            baselines=baselines(),
        )
        if is_worker():
            return None
        # Where the gate lets nothing pass, another budget is another search, by the same curves.
        finish(study)
        return self._finish(problem, costs, curves, trials)

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

    def _curves(self) -> dict[int, Curves]:
        """By length, the means over its prompts."""
        units = Units(self.storage, self._name("curves"), list(self.prompts), self._settings)
        for key in units.claim(description="prompts"):
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
        timing = Units(self.storage, self._name("times"), ["scale"], settings)
        for key in timing.claim(progress=False):
            scale = 1.0
            # What this machine takes says nothing of a table that another one was measured for.
            if self.costs.of_machine(self.config.device):
                scale = measure_scale(self.loaded, problem, self._calibration[0], backend=self.config.backend)
            timing.put(key, scale)
        timing.finish()
        costs = self.costs.scaled(float(timing.results()["scale"]))
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

    def _finish(self, problem: Problem, costs: Costs, curves: Mapping[int, Curves], trials: Sequence[Any]) -> Artifact:
        """Held-out prompts decide what is written."""
        model = self.loaded.model
        settlements = [problem.settle(parameters(1, trial.params)) for trial in front(trials)]
        raised = raise_until(problem, settlements, model, self._judges(), self.config.limits)
        total = max(raised.chosen.settlement.cost, problem.total)
        if raised.fault is not None:
            more = total / problem.total
            print(
                f"the gate: {raised.fault}; by those prompts too, {more:.2f} times the budget passes", file=sys.stderr
            )
        uniform = by_head(problem.curves, problem.costs, total)
        outcome = Outcome(
            problem=problem,
            costs=costs,
            curves=curves,
            candidates=self.candidates,
            raised=raised,
            uniform=uniform,
            uniform_drift=problem.drift(model, raised.judges.logits, uniform),
            trials=len(trials),
            calibration=self._about_prompts(),
            loaded=self.loaded,
        )
        return build_artifact(self._about(), outcome)

    def _judges(self) -> Iterator[Judges]:
        """The prompts that were held out, then others, each set unlike those before, as far as texts have any."""
        config, prompts, seen = self.config, self.held_out, list(self.prompts.values())
        for number in range(len(JUDGES)):
            if number:
                seen = [*seen, *prompts]
                how: dict[str, Any] = {"length": self._longest, "samples": config.samples, "seed": config.seed}
                try:
                    prompts = held_out(config.tasks, self.loaded.tokenizer, **how, seen=seen, number=number)
                except HeadwiseError:
                    return
            yield Judges(
                prompts=prompts,
                logits=DenseLogits(self.loaded.model, prompts),
                curves=partial(self._curves_of_judges, number, prompts),
            )

    def _curves_of_judges(self, number: int, prompts: Sequence[Prompt]) -> Curves:
        """The means over one of the held-out sets."""
        settings = {**self._settings, "held out": digest(prompts)}
        units = Units(self.storage, self._name(JUDGES[number]), [str(i) for i in range(len(prompts))], settings)
        for key in units.claim(description="held-out prompts"):
            units.put(key, asdict(self._score(prompts[int(key)], self._longest)))
        units.finish()
        return Curves.mean([Curves(**arrays) for arrays in units.results().values()])
