"""The search with one budget for the whole model: curves of every head, spent where they save most, proven end to end.

1. Curves: each calibration prompt is one dense pass on which every head tries every candidate (search.curves).
2. Allocation: for a budget the exact best by the curves (search.allocate), in seconds of this machine or FLOPs.
3. Refinement: Optuna weighs groups of layers by what the whole model says (search.refine); a front of cost and KL.
4. Gate: held-out prompts; where they lose more than allowed, the heads that they show to be worst get more.

1 and 3 are shared by all processes of a search through one Optuna storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import Artifact, Calibration, HeadwiseError, ModelInfo
from artifacts.files import check_writable
from kernels.patterns import Pattern
from profiling.logits import DenseLogits
from profiling.models import LoadedModel, load_model
from profiling.prompts import Prompt, digest, make_prompts, parse_task
from runtime.fingerprint import fingerprint
from search.attention_time import measure_scale
from search.costs import Costs, Unit, costs_for
from search.curves import Curves, score_prompt
from search.gate import DEFAULT_TASKS, Limits, held_out
from search.gate_rounds import Raised, raise_until
from search.ladder import ladder
from search.model_record import Outcome, build_artifact, describe
from search.refine import Problem, baselines, front, objective, parameters
from search.serving import serving_backend
from search.storage import open_storage
from search.study import finish, open_study
from search.trials import run_trials
from search.units import Units
from search.workers import is_worker, workers

DENSE_TAIL = 64
DEFAULT_BUDGET = 0.25
DEFAULT_TRIALS = 24
# What a length at most is where none is asked for: beyond it a search takes long, and sizes go with the length.
_LONGEST = 8192


@dataclass(frozen=True, kw_only=True)
class ModelSearch:
    """What a search with one budget for the model is asked to do; None takes the default that depends on the model.

    budget: cost of all heads' attention, as a share of what computing everything by the same kernels costs.
    lengths: prompts are made at each; the patterns are for the longest, the others tell how sizes go with the length.
    """

    model: str
    out: Path
    tasks: tuple[str, ...] = DEFAULT_TASKS
    lengths: tuple[int, ...] | None = None
    samples: int = 1
    budget: float = DEFAULT_BUDGET
    cost: Unit = "seconds"
    cost_table: Path | None = None
    n_trials: int = DEFAULT_TRIALS
    timeout: float | None = None
    storage: str | None = None
    workers: int = 1
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    backend: str = "auto"
    revision: str | None = None
    dense_below: int | None = None
    dense_tail: int = DENSE_TAIL
    beyond_positions: bool = False
    fresh: bool = False
    picture: bool = True
    command: str = ""
    argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("samples", "n_trials", "workers", "dense_below"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise HeadwiseError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.lengths is not None and min(self.lengths) < 2 * DENSE_TAIL:
            raise HeadwiseError(f"--length must be at least {2 * DENSE_TAIL}, got {min(self.lengths)}")
        if not 0 < self.budget <= 1:
            raise HeadwiseError(f"--budget must be above 0 and at most 1 (all of attention), got {self.budget:g}")
        if self.dense_tail < 0:
            raise HeadwiseError(f"--dense-tail must be at least 0, got {self.dense_tail}")
        if self.timeout is not None and not self.timeout > 0:
            raise HeadwiseError(f"--timeout must be above 0 seconds, got {self.timeout:g}")


def run(config: ModelSearch) -> Artifact | None:
    """Search, and write `config.out` with its sidecar; None in a process that another one started to help it.

    Raises:
        HeadwiseError: anything the user has to put right, or the gate, that nothing passes; no file is written then.
    """
    check_writable(config.out)
    for task in config.tasks:
        parse_task(task)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device, revision=config.revision)
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    return search_model(config, loaded, model)


def search_model(config: ModelSearch, loaded: LoadedModel, model: ModelInfo) -> Artifact | None:
    """The search on a model that is loaded and fingerprinted."""
    lengths = _lengths(config, model)
    prompts = _calibration(config, loaded, lengths)
    costs = costs_for(
        config.cost,
        model,
        length=lengths[-1],
        lengths=lengths,
        dtype=config.dtype,
        device=config.device,
        table=config.cost_table,
    )
    backend = serving_backend(config.backend, model, config.dtype, config.device)
    search = _Search(config, loaded, model, prompts, lengths, costs, backend)
    with workers(config.workers, "search.heads", config.argv):
        return search.run()


def _lengths(config: ModelSearch, model: ModelInfo) -> tuple[int, ...]:
    lengths = tuple(sorted(set(config.lengths or (min(_LONGEST, model.max_positions),))))
    if lengths[-1] > model.max_positions and not config.beyond_positions:
        raise HeadwiseError(
            f"--length {lengths[-1]} is more than the {model.max_positions} positions of {model.name}; "
            "choose a shorter one, or pass --beyond-positions to go past what the model was trained on"
        )
    return lengths


def _calibration(config: ModelSearch, loaded: LoadedModel, lengths: Sequence[int]) -> dict[str, Prompt]:
    """All calibration prompts by `length/task/number`."""
    found: dict[str, Prompt] = {}
    for length in lengths:
        for task in config.tasks:
            made = make_prompts(task, loaded.tokenizer, length=length, samples=config.samples, seed=config.seed)
            found |= {f"{length}/{parse_task(task).name}/{i}": prompt for i, prompt in enumerate(made)}
    return found


class _Search:
    """One search: what its phases share."""

    def __init__(
        self,
        config: ModelSearch,
        loaded: LoadedModel,
        model: ModelInfo,
        prompts: Mapping[str, Prompt],
        lengths: tuple[int, ...],
        costs: Costs,
        backend: str,
    ) -> None:
        self._config, self._loaded, self._model = config, loaded, model
        self._prompts, self._lengths, self._costs, self._backend = prompts, lengths, costs, backend
        self._length = lengths[-1]
        self._candidates: dict[int, tuple[Pattern, ...]] = {length: ladder(length) for length in lengths}
        self._storage = open_storage(config.storage, config.out)
        calibration = {"prompts": digest(list(prompts.values())), "tasks": list(config.tasks), "lengths": list(lengths)}
        self._settings = {
            "model": model.name,
            "weights": model.weights_sha256,
            **calibration,
            "dtype": config.dtype,
            "device": config.device,
            "backend": config.backend,
            "dense tail": config.dense_tail,
            "candidates": len(self._candidates[self._length]),
        }

    def run(self) -> Artifact | None:
        config, name = self._config, self._config.out.stem
        units = Units(self._storage, f"{name}.curves", list(self._prompts), self._settings, fresh=config.fresh)
        for key in units.claim(description="prompts"):
            length = int(key.partition("/")[0])
            units.put(key, asdict(self._score(self._prompts[key], length)))
        found = {key: Curves(**arrays) for key, arrays in units.results().items()}
        curves = {
            length: Curves.mean([one for key, one in found.items() if key.startswith(f"{length}/")])
            for length in self._lengths
        }
        if not curves[self._length].searched.any():
            raise HeadwiseError(f"every layer of {self._model.name} slides over a window already: nothing to search")
        problem, costs, timing = self._problem(curves[self._length])
        settings = {
            **self._settings,
            "budget": config.budget,
            "cost": config.cost,
            "scale": round(costs.scale, 12),
            "seed": config.seed,
        }
        study = open_study(
            self._storage, f"{name}.trials", settings, directions=("minimize", "minimize"), fresh=config.fresh
        )
        calibration = [prompt for key, prompt in self._prompts.items() if key.startswith(f"{self._length}/")]
        trials = run_trials(
            study,
            objective(problem, self._loaded.model, DenseLogits(self._loaded.model, calibration)),
            n_trials=config.n_trials,
            timeout=config.timeout,
            seed=config.seed,
            baselines=baselines(),
        )
        if is_worker():
            return None
        artifact = self._finish(problem, costs, curves, trials)
        for study_like in (units, timing):
            study_like.finish()
        finish(study)
        return artifact

    def _score(self, prompt: Prompt, length: int) -> Curves:
        return score_prompt(
            self._loaded,
            prompt,
            self._candidates[length],
            layers=self._model.num_layers,
            dense_tail=self._config.dense_tail,
            backend=self._config.backend,
        )

    def _problem(self, curves: Curves) -> tuple[Problem, Costs, Units]:
        """What is to be spent on what; the table's seconds are brought to those of this model's layers first."""
        candidates = self._candidates[self._length]

        def made(costs: Costs) -> Problem:
            each = costs.of(candidates, curves.tiles)
            heads = int(np.isfinite(each[..., 0]).sum())
            return Problem(
                model=self._model,
                candidates=candidates,
                curves=curves,
                costs=each,
                total=self._config.budget * costs.all_keys() * heads,
                dense_tail=self._config.dense_tail,
                describe=lambda settlement: describe(self._about(), self._calibration_info(), settlement, problem),
            )

        problem = made(self._costs)
        settings = {**self._settings, "budget": self._config.budget, "table": self._costs.identity}
        timing = Units(self._storage, f"{self._config.out.stem}.times", ["scale"], settings, fresh=self._config.fresh)
        for key in timing.claim(description="times", progress=False):
            scale = 1.0
            if self._costs.unit == "seconds":
                prompt = next(prompt for name, prompt in self._prompts.items() if name.startswith(f"{self._length}/"))
                scale = measure_scale(self._loaded, problem, prompt, backend=self._config.backend)
            timing.put(key, scale)
        costs = self._costs.scaled(float(timing.results()["scale"]))
        problem = made(costs)
        if problem.total <= problem.least * 1.01:
            share = problem.least / problem.total * self._config.budget
            raise HeadwiseError(
                f"--budget {self._config.budget:g} is impossible at {self._length} tokens: the cheapest candidates "
                f"cost {share:.3f} of all of attention; ask for more, or for a longer --length"
            )
        return problem, costs, timing

    def _about(self) -> Any:
        return replace(self._config, backend=self._backend)

    def _calibration_info(self) -> Calibration:
        return Calibration(
            tasks=tuple(dict.fromkeys(parse_task(task).name for task in self._config.tasks)),
            lengths=self._lengths,
            samples=self._config.samples,
            sha256=digest(list(self._prompts.values())),
        )

    def _finish(self, problem: Problem, costs: Costs, curves: Mapping[int, Curves], trials: Sequence[Any]) -> Artifact:
        """Held-out prompts decide what is written."""
        config, model = self._config, self._loaded.model
        prompts = held_out(
            config.tasks, self._loaded.tokenizer, length=self._length, samples=config.samples, seed=config.seed
        )
        logits = DenseLogits(model, prompts)
        points = [problem.settle(parameters(1, trial.params)) for trial in front(trials)]
        raised: Raised = raise_until(
            problem,
            points,
            model,
            logits,
            config.limits,
            curves_of=lambda: Curves.mean([self._score(prompt, self._length) for prompt in prompts]),
        )
        uniform = problem.settle(None)
        outcome = Outcome(
            problem=problem,
            costs=costs,
            curves=curves,
            candidates=self._candidates,
            raised=raised,
            uniform=uniform,
            uniform_drift=problem.drift(model, logits, uniform),
            trials=len(trials),
            calibration=self._calibration_info(),
            loaded=self._loaded,
            prompt=prompts[0],
        )
        return build_artifact(self._about(), outcome)
