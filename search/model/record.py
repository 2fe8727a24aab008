"""The artifact of a search: rows, frontier, evidence and every score.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from artifacts import (
    Artifact,
    Calibration,
    Front,
    Pattern,
    Point,
    Prefill,
    SearchCost,
    SearchInfo,
    Summary,
    pattern_name,
    window_arrays,
)
from artifacts.analysis.sections import save_searched
from profiling.prompts.prompt import digest
from profiling.speed.layer_times import ANCHOR
from search.model.config import ModelSearch
from search.model.evidence import evidence
from search.model.frontier import frontier, loss_ratios, scaled_loss
from search.model.losses import mean_kl
from search.model.rows import as_artifact_pattern, score_arrays, winners
from search.model.run import SearchRun
from search.model.speed import shortest_gain


def build(config: ModelSearch, run: SearchRun) -> tuple[Artifact, dict[str, np.ndarray]]:
    """The artifact, still without evidence, and its sidecar's arrays."""
    allocation = run.allocation
    rows, patterns = allocation.rows(run.candidates)
    points, others = _points(run)
    front = Front(
        length=run.length,
        unit=run.costs.unit,
        dense_cost=_dense_cost(run),
        measured_on="held_out",
        points=points,
    )
    prefill = Prefill(
        dense_below=_dense_below(config, run),
        dense_tail=allocation.tail,
        layers=rows,
        length=run.length,
        front=front,
    )
    artifact = Artifact(
        model=run.model,
        search=_search_info(config, run),
        patterns=patterns | others,
        prefill=prefill,
    )
    return artifact, _score_arrays(run)


def write(
    config: ModelSearch, run: SearchRun, artifact: Artifact, arrays: Mapping[str, np.ndarray]
) -> None:
    """Add evidence and frontier, and write the artifact if it gains enough or `keep` is set."""
    search = artifact.search
    assert search is not None, "it is a search's"
    # Times to the first token are known by now.
    changes = {
        "evidence": evidence(run, command=config.command),
        "search": search.model_copy(update={"frontier": frontier(run)}),
    }
    run.artifact = artifact.model_copy(update=changes)
    if run.is_worth_serving or config.keep:
        save_record(run, config.out, run.artifact, arrays, picture=config.picture)


def save_record(
    run: SearchRun,
    out: Path,
    artifact: Artifact,
    arrays: Mapping[str, np.ndarray],
    *,
    picture: bool,
) -> None:
    """Write an artifact with its scores, the windows that the search has seen, and its picture."""
    run.artifact = save_searched(artifact, out, {**arrays, **window_arrays(run.seen.digests)})
    run.written = True
    if picture:
        from profiling.pictures.patterns import draw_pattern_map

        draw_pattern_map(out, out.with_suffix(""))


def search_info(
    run: SearchRun, *, command: str, tasks: tuple[str, ...], samples: int, **own: Any
) -> SearchInfo:
    """The artifact's section on a search.

    Args:
        run: the search.
        command: the command line.
        tasks: of the calibration.
        samples: prompts of each task.
        own: fields that differ between searches.
    """
    calibration = Calibration(
        tasks=tasks,
        length=run.length,
        samples=samples,
        sha256=digest(run.prompts),
        seen_windows=len(run.seen.digests),
    )
    return SearchInfo(
        tool_version=version("headwise"),
        command=command,
        calibration=calibration,
        device=run.device,
        dtype=run.dtype,
        kernel_backend=run.backend,
        **own,
    )


def _dense_below(config: ModelSearch, run: SearchRun) -> int:
    """The shortest prompt that patterns serve: as asked for, measured, or half the length."""
    if config.dense_below is not None:
        return config.dense_below
    if run.attention:
        return shortest_gain(run.attention)
    return max(1, run.length // 2)


def _dense_cost(run: SearchRun) -> float:
    """Cost of the fastest dense baseline, in the unit that was spent."""
    counted = run.heads.total(1.0)
    if not run.attention:
        return counted
    # As fast as the machine was when candidates were timed.
    return counted * run.longest.dense / run.longest.seconds[ANCHOR]


def _points(run: SearchRun) -> tuple[tuple[Point, ...], dict[str, Pattern]]:
    """Points that no other beats in both cost and KL, the cheapest first, and their patterns."""
    dense_cost = _dense_cost(run)
    points: list[Point] = []
    patterns: dict[str, Pattern] = {}
    for allocation, losses in sorted(
        run.points, key=lambda point: (point[0].cost, mean_kl(point[1]))
    ):
        kl = mean_kl(losses)
        if points and (kl >= points[-1].kl or allocation.cost <= points[-1].cost):
            continue
        curves = run.heads.curves[allocation.tail]
        density = run.density(allocation.tail)
        lost = run.accepted.proof.verdict.lost_high
        layers = None
        if allocation is not run.allocation:
            layers, named = allocation.rows(run.candidates)
            patterns |= named
            if lost is not None:
                ratio = loss_ratios(run, allocation.candidates)["answer"]
                is_cheaper = allocation.cost < run.allocation.cost
                least = lost if is_cheaper else None
                lost = min(scaled_loss(lost, ratio, least=least), 1.0)
        point = Point(
            cost=allocation.cost,
            speedup=dense_cost / allocation.cost,
            kl=kl,
            recall=min(1.0, float(np.nanmean(allocation.pick(curves.recall)))),
            density=min(1.0, float(np.nanmean(allocation.pick(density)))),
            dense_tail=allocation.tail,
            lost=lost,
            layers=layers,
        )
        points.append(point)
    return tuple(points), patterns


def _search_info(config: ModelSearch, run: SearchRun) -> SearchInfo:
    """The artifact's section on its search."""
    allocation = run.allocation
    curves = run.heads.curves[allocation.tail]
    summary = Summary(
        recall=min(1.0, float(np.nanmean(allocation.pick(curves.recall)))),
        error=float(np.nanmean(allocation.pick(curves.error))),
        density=min(1.0, float(np.nanmean(allocation.pick(run.density(allocation.tail))))),
        winners=winners(*allocation.rows(run.candidates)),
    )
    return search_info(
        run,
        command=config.command or "headwise search",
        tasks=tuple(dict.fromkeys(sequence.task for sequence in run.calibration)),
        samples=config.samples,
        preset="scaled",
        seed=config.seed,
        allocation="model",
        budget=None if config.budget is None else f"{config.budget:g}",
        spent=run.spent,
        cost=SearchCost(unit=run.costs.unit, device=run.costs.device or config.device),
        gradient_fault=run.gradient_fault,
        summary=summary,
    )


def _score_arrays(run: SearchRun) -> dict[str, np.ndarray]:
    """Each head's candidate and all scores, (L, H) each; NaN or -1 in layers without patterns."""
    allocation = run.allocation
    curves = run.heads.curves[allocation.tail]
    measures = {
        "objective": curves.loss(allocation.prompt_weights),
        "change": curves.change,
        "error": curves.error,
        "recall": curves.recall,
        "density": run.density(allocation.tail),
        run.costs.unit: run.heads.costs[allocation.tail],
    }
    names = [pattern_name(as_artifact_pattern(pattern)) for pattern in run.candidates]
    return {
        **score_arrays(allocation.candidates, names, measures),
        "allocation.price": np.full(len(allocation.candidates), allocation.price),
    }
