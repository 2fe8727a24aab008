"""From a search with one budget for the model to its artifact: rows, front, growth, costs, evidence and every score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import (
    Artifact,
    Calibration,
    Front,
    Measurement,
    Prefill,
    SearchCost,
    SearchInfo,
    Summary,
    pattern_name,
)
from artifacts import Point as FrontPoint
from artifacts.sections import save_searched
from kernels.patterns import Pattern
from profiling.bench import environment
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from profiling.speed.cost_table import embed
from runtime import Headwise
from search.attention_time import measured_seconds, one_of_each_task
from search.costs import Costs
from search.crossover import measured_dense_below
from search.curves import Curves
from search.gate_rounds import Point, Raised
from search.growth import fit
from search.record import as_artifact_pattern, tool_version
from search.refine import Problem
from search.settle import Settlement, rows_of

if TYPE_CHECKING:
    from search.model_budget import ModelSearch

_EACH = " with a budget for each head"


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a search came to. uniform: the paper's way of spending the same budget, on the same held-out prompts."""

    problem: Problem
    costs: Costs
    curves: Mapping[int, Curves]
    candidates: Mapping[int, tuple[Pattern, ...]]
    raised: Raised
    uniform: Point
    trials: int
    calibration: Calibration
    loaded: LoadedModel


def describe(
    config: ModelSearch, calibration: Calibration, settlement: Settlement, problem: Problem, *, n_trials: int = 0
) -> SearchInfo:
    """How a settlement was found, with its means over the calibration prompts."""
    curves, searched = problem.curves, settlement.chosen >= 0
    kinds = Counter(problem.candidates[c].kind for c in settlement.chosen[searched])
    return SearchInfo(
        tool_version=tool_version(),
        command=config.command or "search.model_budget",
        preset="scaled",
        seed=config.seed,
        calibration=calibration,
        allocation="model",
        budget=f"{config.budget:g}",
        target_density=min(1.0, config.budget),
        cost=None,
        n_trials=n_trials,
        device=config.device,
        dtype=config.dtype,
        kernel_backend=config.backend,
        summary=Summary(
            recall=float(np.nanmean(settlement.pick(curves.recall))),
            error=float(np.nanmean(settlement.pick(curves.error))),
            density=min(1.0, float(np.nanmean(settlement.pick(problem.density)))),
            winners=dict(kinds.most_common()),
        ),
    )


def build_artifact(config: ModelSearch, outcome: Outcome) -> Artifact:
    """Write the artifact with its sidecar to `config.out`."""
    problem, chosen, costs = outcome.problem, outcome.raised.chosen, outcome.costs
    length = costs.length
    rows, patterns = rows_of(chosen.settlement, problem.candidates)
    points = [(point, *rows_of(point.settlement, problem.candidates)) for point in outcome.raised.points]
    for _, _, named in points:
        patterns |= named
    heads = int((chosen.settlement.chosen >= 0).sum())
    dense_cost = costs.dense() * heads
    search = describe(config, outcome.calibration, chosen.settlement, problem, n_trials=outcome.trials)
    section, arrays = embed([costs.table] if costs.table else [], optimised=costs.table)
    search = search.model_copy(update={"cost": SearchCost(unit=costs.unit, device=costs.device or config.device)})
    prefill = Prefill(
        dense_below=config.dense_below or max(1, length // 2),
        dense_tail=config.dense_tail,
        layers=rows,
        growth=fit(outcome.curves, outcome.candidates, chosen.settlement.chosen, length),
        front=Front(
            length=length,
            unit=costs.unit,
            dense_cost=dense_cost,
            measured_on="held_out" if outcome.raised.judges.fresh else "calibration",
            points=tuple(_front_point(problem, point, layers, dense_cost) for point, layers, _ in points),
        ),
    )
    artifact = Artifact(model=problem.model, search=search, patterns=patterns, prefill=prefill, costs=section)
    # Times of this machine say nothing of another one's table.
    here = costs.of_machine(config.device)
    measured = _seconds(outcome, config) if here else []
    if config.dense_below is None and here:
        always = artifact.model_copy(update={"prefill": prefill.model_copy(update={"dense_below": 0})})
        below = measured_dense_below(outcome.loaded, Headwise(always), length)
        artifact = artifact.model_copy(update={"prefill": prefill.model_copy(update={"dense_below": below})})
    artifact = artifact.model_copy(update={"evidence": _evidence(config, outcome, chosen, measured)})
    saved = save_searched(artifact, config.out, {**arrays, **_arrays(outcome)})
    if config.picture:
        from profiling.pattern_map import draw_pattern_map

        draw_pattern_map(config.out, config.out.with_suffix(""))
    return saved


def _front_point(problem: Problem, point: Point, layers: Any, dense_cost: float) -> FrontPoint:
    return FrontPoint(
        cost=point.settlement.cost,
        speedup=dense_cost / point.settlement.cost,
        kl=point.drift.mean_kl,
        recall=min(1.0, float(np.nanmean(point.settlement.pick(problem.curves.recall)))),
        density=min(1.0, float(np.nanmean(point.settlement.pick(problem.density)))),
        layers=layers,
    )


def _seconds(outcome: Outcome, config: ModelSearch) -> list[float]:
    """Attention of one prefill as it is on this machine, on prompts that were held out: of what is served, and of the
    same total as a budget for each head."""
    settlements = [outcome.raised.chosen.settlement, outcome.uniform.settlement]
    prompts = _timed_on(outcome, config)
    return measured_seconds(outcome.loaded, outcome.problem, settlements, prompts, backend=config.backend)


def _timed_on(outcome: Outcome, config: ModelSearch) -> list[Prompt]:
    return one_of_each_task(outcome.raised.judges.prompts, config.samples)


def _evidence(
    config: ModelSearch, outcome: Outcome, chosen: Point, measured: Sequence[float]
) -> tuple[Measurement, ...]:
    where = environment(config.device)
    shared: dict[str, Any] = {
        "command": config.command or "search.model_budget",
        "device": where.pop("device"),
        "versions": where,
        "length": outcome.costs.length,
        "samples": config.samples * len(outcome.calibration.tasks),
    }
    uniform, tasks = outcome.uniform.drift, ", ".join(outcome.calibration.tasks)
    # Where no prompts were left that had no part in it.
    prompts = f"held-out {tasks}" if outcome.raised.judges.fresh else f"{tasks} that the gate gave budget by"
    found = [
        Measurement(
            name=f"KL to dense attention on {prompts}",
            value=chosen.drift.mean_kl,
            unit="nats a token",
            baseline=uniform.mean_kl,
            baseline_name="a budget for each head, of the same total",
            **shared,
        ),
        Measurement(
            name=f"perplexity on {prompts}",
            value=chosen.drift.perplexity_ratio,
            unit="times that of dense attention",
            baseline=uniform.perplexity_ratio,
            baseline_name="a budget for each head, of the same total",
            **shared,
        ),
    ]
    for (point, whose), seconds in zip(((chosen, ""), (outcome.uniform, _EACH)), measured, strict=False):
        found.append(
            Measurement(
                name=f"attention of one prefill{whose}, index build included",
                value=seconds,
                unit="s",
                baseline=point.settlement.cost,
                baseline_name="predicted from the cost table",
                **shared | {"samples": len(_timed_on(outcome, config))},
            )
        )
    return tuple(found)


def _arrays(outcome: Outcome) -> dict[str, np.ndarray]:
    """What each head got and every candidate's scores, (L, H) each; NaN or -1 in layers left alone."""
    problem, settlement = outcome.problem, outcome.raised.chosen.settlement
    curves = problem.curves
    measures = {
        "objective": curves.loss,
        "change": curves.change,
        "error": curves.error,
        "recall": curves.recall,
        "density": problem.density,
        outcome.costs.unit: problem.costs,
    }
    arrays: dict[str, np.ndarray] = {"chosen.candidate": settlement.chosen.astype(np.int32)}
    arrays["allocation.weight"] = settlement.weight.astype(np.float64)
    assert settlement.price is not None, "a budget for the model has one"
    arrays["allocation.price"] = np.full(len(settlement.weight), settlement.price)
    for name, values in measures.items():
        arrays[f"chosen.{name}"] = settlement.pick(values).astype(np.float32)
    for c, pattern in enumerate(problem.candidates):
        label = pattern_name(as_artifact_pattern(pattern))
        for name, values in measures.items():
            arrays[f"candidates.{c}.{label}.{name}"] = values[..., c].astype(np.float32)
    return arrays
