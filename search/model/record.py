"""From a search with one budget for the model to its artifact: rows, front, growth, costs, evidence and every score."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts import (
    Artifact,
    Calibration,
    Evidence,
    Front,
    Measurement,
    ModelInfo,
    Prefill,
    PromptSet,
    SearchCost,
    SearchInfo,
    Summary,
    TaskFigures,
    front_arrays,
    pattern_name,
    window_arrays,
)
from artifacts import Point as FrontPoint
from artifacts.sections import save_searched
from kernels.patterns import Pattern
from profiling.bench import environment
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.prompts.held_out import Seen
from profiling.quality.sequences import TokenSequence
from profiling.speed.baselines import EVIDENCE, KERNEL, MODEL
from profiling.speed.cost_table import embed
from search.common.scores import as_artifact_pattern, score_arrays, tool_version, winners
from search.model.allocation import Allocation, Heads
from search.model.config import ModelSearch
from search.model.costs import Costs
from search.model.crossover import dense_below
from search.model.curves import Curves
from search.model.gate import Gated
from search.model.growth import fit
from search.model.refine import Trial
from search.model.task_losses import TaskLoss, lost_answers, mean_kl
from search.model.timing import ANCHOR, MOVED, SDPA, Timings, time_layers

_CHOSEN = "chosen"


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a search found, to be written."""

    config: ModelSearch
    loaded: LoadedModel
    model: ModelInfo
    backend: str
    searched: Sequence[int]
    candidates: Mapping[int, tuple[Pattern, ...]]
    curves: Mapping[int, Mapping[int, Curves]]
    costs: Costs
    heads: Heads
    trials: tuple[Trial, ...]
    gated: Gated
    calibration: Sequence[TokenSequence]
    calibration_sha256: str
    seen: Seen
    gradient_fault: str | None

    @property
    def length(self) -> int:
        return max(self.candidates)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The candidates of the longest length."""
        return self.candidates[self.length]

    def density(self, tail: int) -> np.ndarray:
        """(L, H, C) tiles computed over those of dense attention."""
        tiles = self.heads.curves[tail].tiles
        dense = next(c for c, pattern in enumerate(self.patterns) if pattern.kind == "dense")
        share: np.ndarray = tiles / tiles[..., dense : dense + 1]
        return share


def write(outcome: Outcome) -> Artifact:
    """Time what was found, and write the artifact with its sidecar."""
    config, chosen = outcome.config, outcome.gated.chosen.allocation
    here = outcome.costs.of_machine(config.device)
    timings, below = _timed(outcome, chosen) if here else (None, None)
    rows, patterns = chosen.rows(outcome.patterns)
    points = _front(outcome, timings)
    listed = []
    for _, allocation in points:
        layers, named = allocation.rows(outcome.patterns)
        patterns |= named
        listed.append(layers)
    section, arrays = embed([outcome.costs.table] if outcome.costs.table else [], optimised=outcome.costs.table)
    arrays |= front_arrays(patterns, listed)
    windows = outcome.seen.digests
    arrays |= window_arrays(windows)
    if config.dense_below is not None:
        below = config.dense_below
    prefill = Prefill(
        dense_below=below if below is not None else max(1, outcome.length // 2),
        dense_tail=chosen.tail,
        layers=rows,
        growth=fit(
            {length: curves[chosen.tail] for length, curves in outcome.curves.items()},
            outcome.candidates,
            chosen.chosen,
            outcome.length,
        ),
        front=Front(
            length=outcome.length,
            unit=outcome.costs.unit,
            dense_cost=_dense_cost(outcome, timings),
            dense_right=lost_answers(outcome.gated.chosen.tasks)["dense_right"] or None,
            measured_on="held_out",
            points=tuple(point for point, _ in points),
        ),
    )
    artifact = Artifact(
        model=outcome.model,
        search=_search(outcome, chosen, len(windows)),
        patterns=patterns,
        prefill=prefill,
        costs=section,
        evidence=_evidence(outcome, timings),
    )
    saved = save_searched(artifact, config.out, {**arrays, **_arrays(outcome, chosen)})
    if config.picture:
        from profiling.pattern_map import draw_pattern_map

        draw_pattern_map(config.out, config.out.with_suffix(""))
    return saved


def _timed(outcome: Outcome, chosen: Allocation) -> tuple[Timings, int]:
    """Seconds of what was chosen and of dense attention on a held-out prompt, and from which length on it is faster."""
    one = outcome.gated.reported_on[0]
    ids, plans = one.ids[: one.context], chosen.plans(outcome.patterns, outcome.model.num_kv_heads)
    with phase("timing", 2, "steps") as shown:
        timings = time_layers(
            outcome.loaded,
            ids,
            {_CHOSEN: plans},
            outcome.searched,
            sdpa=True,
            backend=outcome.backend,
        )
        shown.update()
        below = dense_below(outcome.loaded, ids, plans, faster=timings.ratio(_CHOSEN) > 1, backend=outcome.backend)
        shown.update()
    return timings, below


def _dense_cost(outcome: Outcome, timings: Timings | None) -> float:
    """What the better dense attention costs, in the unit that was spent."""
    heads = len(outcome.searched) * outcome.model.num_heads
    known = outcome.costs.all_keys() * heads
    if timings is None:
        return known
    # As fast as the machine was when candidates were timed.
    return known * timings.dense / timings.seconds[ANCHOR]


def _front(outcome: Outcome, timings: Timings | None) -> list[tuple[FrontPoint, Allocation]]:
    """The points that no other beats in both cost and KL, the cheapest first."""
    dense_cost = _dense_cost(outcome, timings)
    found: list[tuple[FrontPoint, Allocation]] = []
    for point in sorted(outcome.gated.points, key=lambda p: (p.allocation.cost, mean_kl(p.tasks))):
        one, answers = point.allocation, lost_answers(point.tasks)
        kl = mean_kl(point.tasks)
        if found and (kl >= found[-1][0].kl or one.cost <= found[-1][0].cost):
            continue
        curves = outcome.heads.curves[one.tail]
        made = FrontPoint(
            cost=one.cost,
            speedup=dense_cost / one.cost,
            kl=kl,
            recall=min(1.0, float(np.nanmean(one.pick(curves.recall)))),
            density=min(1.0, float(np.nanmean(one.pick(outcome.density(one.tail))))),
            dense_tail=one.tail,
            lost=answers["lost"] if answers["dense_right"] else None,
        )
        found.append((made, one))
    return found


def _search(outcome: Outcome, chosen: Allocation, windows: int) -> SearchInfo:
    config, curves = outcome.config, outcome.heads.curves[chosen.tail]
    return SearchInfo(
        tool_version=tool_version(),
        command=config.command or "search.heads",
        preset="scaled",
        seed=config.seed,
        calibration=Calibration(
            tasks=tuple(dict.fromkeys(one.task for one in outcome.calibration)),
            lengths=tuple(outcome.candidates),
            samples=config.samples,
            sha256=outcome.calibration_sha256,
            seen_windows=windows,
        ),
        allocation="model",
        budget=f"{config.budget:g}",
        target_density=min(1.0, config.budget),
        cost=SearchCost(unit=outcome.costs.unit, device=outcome.costs.device or config.device),
        n_trials=len(outcome.trials),
        gradient_fault=outcome.gradient_fault,
        device=config.device,
        dtype=config.dtype,
        kernel_backend=outcome.backend,
        summary=Summary(
            recall=min(1.0, float(np.nanmean(chosen.pick(curves.recall)))),
            error=float(np.nanmean(chosen.pick(curves.error))),
            density=min(1.0, float(np.nanmean(chosen.pick(outcome.density(chosen.tail))))),
            winners=winners(*chosen.rows(outcome.patterns)),
        ),
    )


def _evidence(outcome: Outcome, timings: Timings | None) -> Evidence:
    gated = outcome.gated
    return Evidence(
        chosen_on=None
        if gated.chosen_on is None
        else _prompt_set("held-out, by which the budget was raised", gated.chosen_on),
        reported_on=_prompt_set("held-out", gated.reported_on),
        tasks=tuple(figures(task, outcome.length) for task in gated.chosen.tasks),
        measurements=_measurements(outcome, timings),
    )


def figures(task: TaskLoss, length: int) -> TaskFigures:
    """A task's losses as an artifact has them."""
    asked = task.nll is not None
    return TaskFigures(
        task=task.task,
        length=length,
        prompts=task.answers if asked else task.sequences,
        kl=task.kl,
        nll_rise=task.nll,
        nll_rise_low=task.nll_low if asked else None,
        nll_rise_high=task.nll_high if asked else None,
        dense_right=task.dense_right if asked else None,
        lost=task.lost if asked else None,
        won=task.won if asked else None,
        perplexity_ratio=task.perplexity,
    )


def _prompt_set(name: str, found: Sequence[TokenSequence]) -> PromptSet:
    content = json.dumps([one.digest for one in found]).encode()
    return PromptSet(name=name, prompts=len(found), sha256=hashlib.sha256(content).hexdigest())


def _measurements(outcome: Outcome, timings: Timings | None) -> tuple[Measurement, ...]:
    """Times of attention on this machine, beside dense attention and beside what was predicted."""
    if timings is None:
        return ()
    assert outcome.costs.table is not None
    where = environment(outcome.config.device)
    shared: dict[str, Any] = {
        "command": outcome.config.command or "search.heads",
        "device": where.pop("device"),
        "versions": where,
        "length": outcome.length,
        "samples": 1,
        "unit": "s",
    }
    seconds, name = timings.seconds[_CHOSEN], "attention of one prefill, index build included"
    measured = [
        Measurement(name=name, value=seconds, baseline=timings.seconds[dense], baseline_name=said, **shared)
        for dense, said in ((ANCHOR, EVIDENCE[KERNEL]), (SDPA, EVIDENCE[MODEL]))
        if dense in timings.seconds
    ]
    # The machine may be faster or slower than it was when candidates were timed: the anchor tells.
    anchor = float(np.median([cost.dense_seconds for cost in outcome.costs.table.costs])) * len(outcome.searched)
    pace = timings.seconds[ANCHOR] / anchor
    if abs(pace - 1) > MOVED:
        print(
            f"dense attention takes {pace:.2f} times what it took when candidates were timed: other work ran beside "
            "one of the two; --fresh on a quiet machine measures costs again",
            file=sys.stderr,
        )
    predicted = outcome.gated.chosen.allocation.cost * pace
    measured.append(Measurement(name=name, value=seconds, baseline=predicted, baseline_name="predicted", **shared))
    return tuple(measured)


def _arrays(outcome: Outcome, chosen: Allocation) -> dict[str, np.ndarray]:
    """What each head got and every candidate's scores, (L, H) each; NaN or -1 in layers left alone."""
    curves = outcome.heads.curves[chosen.tail]
    measures = {
        "objective": curves.loss(chosen.kinds),
        "change": curves.change,
        "error": curves.error,
        "recall": curves.recall,
        "density": outcome.density(chosen.tail),
        outcome.costs.unit: outcome.heads.costs[chosen.tail],
    }
    names = [pattern_name(as_artifact_pattern(pattern)) for pattern in outcome.patterns]
    return {
        **score_arrays(chosen.chosen, names, measures),
        "allocation.weight": chosen.weight.astype(np.float64),
        "allocation.price": np.full(len(chosen.weight), chosen.price),
    }
