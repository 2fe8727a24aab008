"""From a search with one budget for the model to its artifact: rows, front, growth, costs, evidence and every score."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np

from artifacts import (
    Artifact,
    Calibration,
    Front,
    Prefill,
    SearchCost,
    SearchInfo,
    Summary,
    front_arrays,
    pattern_name,
    window_arrays,
)
from artifacts import Point as FrontPoint
from artifacts.sections import save_searched
from profiling.prompts.prompt import digest
from profiling.speed.cost_table import embed
from profiling.speed.layer_times import ANCHOR, Timings
from search.common.scores import as_artifact_pattern, score_arrays, winners
from search.model.allocation import Allocation
from search.model.evidence import evidence, timed
from search.model.growth import fit
from search.model.setup import Outcome
from search.model.task_losses import lost_answers, mean_kl


def write(outcome: Outcome) -> Artifact:
    """Time what was found, and write the artifact with its sidecar."""
    setup, chosen = outcome.setup, outcome.gated.chosen.allocation
    config = setup.config
    timings, below = timed(outcome) if config.measures_costs else (None, None)
    rows, patterns = chosen.rows(setup.patterns)
    points = _front(outcome, timings)
    listed = []
    for _, allocation in points:
        layers, named = allocation.rows(setup.patterns)
        patterns |= named
        listed.append(layers)
    section, arrays = embed([outcome.costs.table] if outcome.costs.table else [], optimised=outcome.costs.table)
    arrays |= front_arrays(patterns, listed)
    windows = setup.seen.digests
    arrays |= window_arrays(windows)
    if config.dense_below is not None:
        below = config.dense_below
    prefill = Prefill(
        dense_below=below if below is not None else max(1, setup.length // 2),
        dense_tail=chosen.tail,
        layers=rows,
        growth=fit(
            {length: curves[chosen.tail] for length, curves in outcome.curves.items()},
            setup.candidates,
            chosen.chosen,
            setup.length,
        ),
        front=Front(
            length=setup.length,
            unit=outcome.costs.unit,
            dense_cost=_dense_cost(outcome, timings),
            dense_right=lost_answers(outcome.gated.points[0].tasks)["dense_right"] or None,
            measured_on="held_out" if outcome.gated.held_out else "calibration",
            points=tuple(point for point, _ in points),
        ),
    )
    artifact = Artifact(
        model=setup.model,
        search=_search(outcome, chosen, len(windows)),
        patterns=patterns,
        prefill=prefill,
        costs=section,
        evidence=evidence(outcome, timings),
    )
    saved = save_searched(artifact, config.out, {**arrays, **_arrays(outcome, chosen)})
    if config.picture:
        from profiling.pattern_map import draw_pattern_map

        draw_pattern_map(config.out, config.out.with_suffix(""))
    return saved


def _dense_cost(outcome: Outcome, timings: Timings | None) -> float:
    """What the better dense attention costs, in the unit that was spent."""
    heads = len(outcome.setup.searched) * outcome.setup.model.num_heads
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
    setup, curves = outcome.setup, outcome.heads.curves[chosen.tail]
    config = setup.config
    return SearchInfo(
        tool_version=version("headwise"),
        command=config.command or "headwise search",
        preset="scaled",
        seed=config.seed,
        calibration=Calibration(
            tasks=tuple(dict.fromkeys(one.task for one in outcome.calibration)),
            lengths=tuple(setup.candidates),
            samples=config.samples,
            sha256=digest([prompt for made in setup.prompts.values() for prompt in made]),
            seen_windows=windows,
        ),
        allocation="model",
        budget=f"{outcome.budget:g}",
        target_density=min(1.0, outcome.budget),
        cost=SearchCost(unit=outcome.costs.unit, device=outcome.costs.device or config.device),
        n_trials=len(outcome.trials),
        gradient_fault=outcome.gradient_fault,
        device=config.device,
        dtype=config.dtype,
        kernel_backend=setup.backend,
        summary=Summary(
            recall=min(1.0, float(np.nanmean(chosen.pick(curves.recall)))),
            error=float(np.nanmean(chosen.pick(curves.error))),
            density=min(1.0, float(np.nanmean(chosen.pick(outcome.density(chosen.tail))))),
            winners=winners(*chosen.rows(setup.patterns)),
        ),
    )


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
    names = [pattern_name(as_artifact_pattern(pattern)) for pattern in outcome.setup.patterns]
    return {
        **score_arrays(chosen.chosen, names, measures),
        "allocation.weight": chosen.weight.astype(np.float64),
        "allocation.price": np.full(len(chosen.weight), chosen.price),
    }
