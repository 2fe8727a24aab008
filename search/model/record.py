"""The artifact of a search: rows, frontier, evidence and every score.

Shapes: L layers, H query heads, C candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Literal

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
from profiling.quality.sequences import TokenSequence
from profiling.speed.layer_times import ANCHOR
from search.model.acceptance import Accepted
from search.model.allocation import Allocation, Heads
from search.model.config import ModelSearch
from search.model.costs import Costs
from search.model.curves import Curves
from search.model.evidence import evidence
from search.model.rows import as_artifact_pattern, score_arrays, winners
from search.model.search_run import SearchRun
from search.model.speed import Speed
from search.model.task_losses import lost_answers, mean_kl

# Speed-up over the fastest dense baseline below which an artifact is not served.
WORTH = 1.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """The result of a search's phases, before it is timed and written.

    Attributes:
        curves: by dense tail.
        least_reason: why more than was asked for could be spent, None where it was not.
        calibration: sequences of the calibration prompts.
        gradient_fault: why gradients are missing.
    """

    run: SearchRun
    curves: Mapping[int, Curves]
    costs: Costs
    heads: Heads
    least_reason: str | None
    accepted: Accepted
    calibration: Sequence[TokenSequence]
    gradient_fault: str | None

    @property
    def allocation(self) -> Allocation:
        """The accepted allocation."""
        return self.accepted.measured.allocation

    @property
    def spent(self) -> float:
        """The cost of the accepted allocation, as a fraction of dense attention's."""
        return round(self.heads.share(self.allocation.cost), 4)

    @property
    def raise_reason(self) -> str | None:
        """The reason why more was spent than was asked for; None where it was not."""
        return "; ".join(filter(None, (self.least_reason, self.accepted.fault))) or None

    def density(self, tail: int) -> np.ndarray:
        """(L, H, C) tiles computed, relative to dense attention's."""
        tiles = self.heads.curves[tail].tiles
        dense = [pattern.kind for pattern in self.run.candidates].index("dense")
        density: np.ndarray = tiles / tiles[..., dense : dense + 1]
        return density


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """A search's artifact and its speed.

    Attributes:
        speed: None where FLOPs were counted.
        written: True if there is a file of it.
    """

    outcome: Outcome
    artifact: Artifact
    speed: Speed | None
    written: bool = False

    @property
    def gain(self) -> float:
        """Speed-up of attention over the fastest dense baseline; in FLOPs, how many times fewer."""
        if self.speed is None:
            return self.outcome.heads.total(1.0) / self.outcome.allocation.cost
        return self.speed.gain

    @property
    def is_worth_serving(self) -> bool:
        """False if attention gains too little, or whole prefills are slower beyond noise."""
        if self.speed is not None and self.speed.first_token is not None:
            _, high = self.speed.first_token.interval
            return self.gain >= WORTH and high >= 1
        return self.gain >= WORTH

    @property
    def is_proven_faster(self) -> bool:
        """True if it gains enough, and whole prefills are faster beyond noise."""
        if self.speed is not None and self.speed.first_token is not None:
            low, _ = self.speed.first_token.interval
            return self.is_worth_serving and low > 1
        return self.is_worth_serving


def build(
    config: ModelSearch, outcome: Outcome, speed: Speed | None
) -> tuple[Artifact, dict[str, np.ndarray]]:
    """The artifact, still without evidence, and its sidecar's arrays."""
    run = outcome.run
    allocation = outcome.allocation
    rows, patterns = allocation.rows(run.candidates)
    points = _front(outcome, speed)
    point_rows = []
    for _, other in points:
        layers, named = other.rows(run.candidates)
        patterns |= named
        point_rows.append(layers)
    arrays = front_arrays(patterns, point_rows)
    windows = run.seen.digests
    arrays |= window_arrays(windows)
    measured_on: Literal["held_out", "calibration"] = "calibration"
    if outcome.accepted.held_out:
        measured_on = "held_out"
    front = Front(
        length=run.length,
        unit=outcome.costs.unit,
        dense_cost=_dense_cost(outcome, speed),
        dense_right=lost_answers(outcome.accepted.points[0].tasks)["dense_right"] or None,
        measured_on=measured_on,
        points=tuple(point for point, _ in points),
    )
    prefill = Prefill(
        dense_below=_dense_below(config, outcome, speed),
        dense_tail=allocation.tail,
        layers=rows,
        length=run.length,
        front=front,
    )
    artifact = Artifact(
        model=run.model,
        search=_search_info(config, outcome, len(windows)),
        patterns=patterns,
        prefill=prefill,
    )
    return artifact, arrays | _score_arrays(outcome)


def write(
    config: ModelSearch,
    outcome: Outcome,
    artifact: Artifact,
    arrays: Mapping[str, np.ndarray],
    speed: Speed | None,
) -> Recorded:
    """Add the evidence, and write the artifact if it gains enough or `keep` is set."""
    proof = evidence(outcome.run, outcome.accepted, outcome.costs, speed, command=config.command)
    artifact = artifact.model_copy(update={"evidence": proof})
    recorded = Recorded(outcome=outcome, artifact=artifact, speed=speed)
    if not (recorded.is_worth_serving or config.keep):
        return recorded
    saved = save_searched(artifact, config.out, dict(arrays))
    if config.picture:
        from profiling.pictures.patterns import draw_pattern_map

        draw_pattern_map(config.out, config.out.with_suffix(""))
    return replace(recorded, artifact=saved, written=True)


def _dense_below(config: ModelSearch, outcome: Outcome, speed: Speed | None) -> int:
    """The shortest prompt that patterns serve: as asked for, measured, or half the length."""
    if config.dense_below is not None:
        return config.dense_below
    if speed is not None:
        return speed.dense_below
    return max(1, outcome.run.length // 2)


def _dense_cost(outcome: Outcome, speed: Speed | None) -> float:
    """Cost of the fastest dense baseline, in the unit that was spent."""
    counted = outcome.heads.total(1.0)
    if speed is None:
        return counted
    # As fast as the machine was when candidates were timed.
    return counted * speed.longest.dense / speed.longest.seconds[ANCHOR]


def _front(outcome: Outcome, speed: Speed | None) -> list[tuple[FrontPoint, Allocation]]:
    """The points that no other beats in both cost and KL, the cheapest first."""
    dense_cost = _dense_cost(outcome, speed)
    points: list[tuple[FrontPoint, Allocation]] = []
    ordered = sorted(
        outcome.accepted.points, key=lambda each: (each.allocation.cost, mean_kl(each.tasks))
    )
    for measured in ordered:
        allocation = measured.allocation
        kl = mean_kl(measured.tasks)
        if points:
            cheaper = points[-1][0]
            if kl >= cheaper.kl or allocation.cost <= cheaper.cost:
                continue
        answers = lost_answers(measured.tasks)
        curves = outcome.heads.curves[allocation.tail]
        density = outcome.density(allocation.tail)
        point = FrontPoint(
            cost=allocation.cost,
            speedup=dense_cost / allocation.cost,
            kl=kl,
            recall=min(1.0, float(np.nanmean(allocation.pick(curves.recall)))),
            density=min(1.0, float(np.nanmean(allocation.pick(density)))),
            dense_tail=allocation.tail,
            lost=answers["lost"] if answers["dense_right"] else None,
        )
        points.append((point, allocation))
    return points


def _search_info(config: ModelSearch, outcome: Outcome, windows: int) -> SearchInfo:
    """The artifact's section on its search.

    Args:
        windows: how many it has seen.
    """
    run = outcome.run
    allocation = outcome.allocation
    curves = outcome.heads.curves[allocation.tail]
    calibration = Calibration(
        tasks=tuple(dict.fromkeys(sequence.task for sequence in outcome.calibration)),
        length=run.length,
        samples=config.samples,
        sha256=digest(run.prompts),
        seen_windows=windows,
    )
    summary = Summary(
        recall=min(1.0, float(np.nanmean(allocation.pick(curves.recall)))),
        error=float(np.nanmean(allocation.pick(curves.error))),
        density=min(1.0, float(np.nanmean(allocation.pick(outcome.density(allocation.tail))))),
        winners=winners(*allocation.rows(run.candidates)),
    )
    return SearchInfo(
        tool_version=version("headwise"),
        command=config.command or "headwise search",
        preset="scaled",
        seed=config.seed,
        calibration=calibration,
        allocation="model",
        budget=f"{config.share:g}",
        spent=outcome.spent,
        cost=SearchCost(unit=outcome.costs.unit, device=outcome.costs.device or config.device),
        gradient_fault=outcome.gradient_fault,
        device=config.device,
        dtype=config.dtype,
        kernel_backend=run.backend,
        summary=summary,
    )


def _score_arrays(outcome: Outcome) -> dict[str, np.ndarray]:
    """Each head's candidate and all scores, (L, H) each; NaN or -1 in layers without patterns."""
    allocation = outcome.allocation
    curves = outcome.heads.curves[allocation.tail]
    measures = {
        "objective": curves.loss(allocation.prompt_weights),
        "change": curves.change,
        "error": curves.error,
        "recall": curves.recall,
        "density": outcome.density(allocation.tail),
        outcome.costs.unit: outcome.heads.costs[allocation.tail],
    }
    names = [pattern_name(as_artifact_pattern(pattern)) for pattern in outcome.run.candidates]
    return {
        **score_arrays(allocation.candidates, names, measures),
        "allocation.price": np.full(len(allocation.candidates), allocation.price),
    }
