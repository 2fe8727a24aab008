"""From a search with one budget for the model to its artifact: rows, front, growth, costs, evidence
and every score."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from artifacts.analysis.sections import save_searched
from profiling.prompts.prompt import digest
from profiling.speed.cost_table import embed
from profiling.speed.layer_times import ANCHOR
from search.common.scores import as_artifact_pattern, score_arrays, winners
from search.model.allocation import Allocation
from search.model.evidence import evidence
from search.model.growth import fit
from search.model.setup import Outcome
from search.model.speed import Speed, attention_speed, first_token
from search.model.task_losses import lost_answers, mean_kl

# Times as fast as the fastest dense baseline: an artifact with less is not worth serving.
WORTH = 1.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """A search's artifact and its speed, None where FLOPs were counted. written: whether there is a
    file of it."""

    outcome: Outcome
    artifact: Artifact
    speed: Speed | None
    written: bool = False

    @property
    def gain(self) -> float:
        """How many times as fast attention is as the fastest dense baseline; in FLOPs how many
        times fewer."""
        if self.speed is None:
            return _dense_cost(self.outcome, None) / self.outcome.gated.chosen.allocation.cost
        return self.speed.gain

    @property
    def is_worth_serving(self) -> bool:
        """Whether attention gains, and a whole prefill is no slower for it."""
        whole = None if self.speed is None else self.speed.first_token
        return self.gain >= WORTH and (whole is None or whole.ratio >= 1)


def record(outcome: Outcome) -> Recorded:
    """Time what was accepted, and write the artifact with its sidecar where it is worth serving, or
    is to be kept."""
    config = outcome.setup.config
    speed = attention_speed(outcome) if config.measures_costs else None
    artifact, arrays = _artifact(outcome, speed)
    if speed is not None:
        speed = replace(speed, first_token=first_token(outcome, artifact, speed))
    artifact = artifact.model_copy(update={"evidence": evidence(outcome, speed)})
    recorded = Recorded(outcome=outcome, artifact=artifact, speed=speed)
    if not (recorded.is_worth_serving or config.keep):
        return recorded
    saved = save_searched(artifact, config.out, arrays)
    if config.picture:
        from profiling.pattern_map import draw_pattern_map

        draw_pattern_map(config.out, config.out.with_suffix(""))
    return replace(recorded, artifact=saved, written=True)


def _artifact(outcome: Outcome, speed: Speed | None) -> tuple[Artifact, dict[str, np.ndarray]]:
    """The artifact, without evidence, and its sidecar's arrays."""
    setup = outcome.setup
    chosen = outcome.gated.chosen.allocation
    rows, patterns = chosen.rows(setup.patterns)
    points = _front(outcome, speed)
    listed = []
    for _, allocation in points:
        layers, named = allocation.rows(setup.patterns)
        patterns |= named
        listed.append(layers)
    section, arrays = embed(
        [outcome.costs.table] if outcome.costs.table else [], optimised=outcome.costs.table
    )
    arrays |= front_arrays(patterns, listed)
    windows = setup.seen.digests
    arrays |= window_arrays(windows)
    prefill = Prefill(
        dense_below=_dense_below(outcome, speed),
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
            dense_cost=_dense_cost(outcome, speed),
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
    )
    return artifact, {**arrays, **_arrays(outcome, chosen)}


def _dense_below(outcome: Outcome, speed: Speed | None) -> int:
    """The fewest tokens that are served by patterns: as asked for, or from where on they gain, or
    half the length."""
    if outcome.setup.config.dense_below is not None:
        return outcome.setup.config.dense_below
    if speed is not None:
        return speed.dense_below
    return max(1, outcome.setup.length // 2)


def _dense_cost(outcome: Outcome, speed: Speed | None) -> float:
    """Cost of the fastest dense baseline, in the unit that was spent."""
    known = outcome.heads.total(1.0)
    if speed is None:
        return known
    # As fast as the machine was when candidates were timed.
    return known * speed.longest.dense / speed.longest.seconds[ANCHOR]


def _front(outcome: Outcome, speed: Speed | None) -> list[tuple[FrontPoint, Allocation]]:
    """The points that no other beats in both cost and KL, the cheapest first."""
    dense_cost = _dense_cost(outcome, speed)
    found: list[tuple[FrontPoint, Allocation]] = []
    for point in sorted(outcome.gated.points, key=lambda p: (p.allocation.cost, mean_kl(p.tasks))):
        one = point.allocation
        answers = lost_answers(point.tasks)
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
    setup = outcome.setup
    curves = outcome.heads.curves[chosen.tail]
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
    """What each head got and every candidate's scores, (L, H) each; NaN or -1 in layers left
    alone."""
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
