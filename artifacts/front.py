"""The front: settings of the same model between fast and exact, of which one is chosen when it is loaded."""

from __future__ import annotations

from itertools import pairwise
from math import isclose
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from artifacts.errors import HeadwiseError
from artifacts.fields import Count, Positive, Rows, Share
from artifacts.patterns import Record

if TYPE_CHECKING:
    from artifacts.schema import Artifact

MAX_POINTS = 32


class Point(Record):
    """One setting of all heads, and what it costs and loses.

    cost: of all layers' attention in one prefill, index build included, in the front's unit. speedup: the front's
    dense_cost over it: of attention alone, predicted. kl: mean divergence of the next-token distribution from dense
    attention's, in nats a token. recall, density: means over the searched heads. layers: as in prefill.layers.
    """

    cost: Positive
    speedup: Positive
    kl: Annotated[float, Field(ge=0.0)]
    recall: Share
    density: Share
    layers: Rows


class Front(Record):
    """Points that none of the others beats in both cost and divergence, the cheapest first.

    length: of the prompts that cost is predicted and everything else measured for. unit: "seconds" are those of
    search.cost's device. dense_cost: what dense attention costs there, in the same unit. measured_on: the prompts of
    kl and recall.
    """

    length: Count
    unit: Literal["seconds", "flops"]
    dense_cost: Positive
    measured_on: Literal["calibration", "held_out"]
    points: Annotated[tuple[Point, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @model_validator(mode="after")
    def _sorted(self) -> Self:
        for i, (a, b) in enumerate(pairwise(self.points), start=1):
            if b.cost <= a.cost:
                raise ValueError(f"points must get dearer, but points[{i}] costs {b.cost:g} after {a.cost:g}")
            if b.kl >= a.kl:
                raise ValueError(
                    f"points[{i}] costs more than the one before without being better (kl {b.kl:g} after {a.kl:g}): "
                    "leave it out"
                )
        for i, point in enumerate(self.points):
            if not isclose(point.speedup, expected := self.dense_cost / point.cost, rel_tol=1e-3):
                raise ValueError(f"points[{i}].speedup is {point.speedup:g}, dense_cost over cost is {expected:g}")
        return self

    def choose(
        self,
        *,
        target_speedup: float | None = None,
        target_kl: float | None = None,
        target_recall: float | None = None,
    ) -> Point:
        """The best point for one target.

        Args:
            target_speedup: at least so many times as fast as dense attention: of these the point with the least kl.
            target_kl: at most so many nats a token from dense: of these the fastest.
            target_recall: at least this share of the attention mass kept: of these the fastest.

        Raises:
            HeadwiseError: no target or several, one that is no number, or one that no point meets.
        """
        given = {"target_speedup": target_speedup, "target_kl": target_kl, "target_recall": target_recall}
        targets = {name: value for name, value in given.items() if value is not None}
        if len(targets) != 1:
            raise HeadwiseError(f"give one of {', '.join(given)}, got {', '.join(targets) or 'none'}")
        ((name, target),) = targets.items()
        if isinstance(target, bool) or not isinstance(target, int | float) or not target >= 0:
            raise HeadwiseError(f"{name} must be a number from 0 on, got {target!r}")
        match name:
            case "target_speedup":
                # The dearest of those that are fast enough is the nearest to dense.
                met = [point for point in reversed(self.points) if point.speedup >= target]
            case "target_kl":
                met = [point for point in self.points if point.kl <= target]
            case _:
                met = [point for point in self.points if point.recall >= target]
        if not met:
            raise HeadwiseError(f"no point of the front meets {name} {target:g}: {self.offers()}")
        return met[0]

    def offers(self) -> str:
        """What the points range over, in a line."""
        recalls = [point.recall for point in self.points]
        first, last = self.points[0], self.points[-1]
        return (
            f"its points have speedups of attention from {last.speedup:.3g} to {first.speedup:.3g}, kl from "
            f"{last.kl:.3g} to {first.kl:.3g} nats a token and recall from {min(recalls):.3g} to {max(recalls):.3g}, "
            f"at {self.length:,} tokens"
        )


def at_target(artifact: Artifact, **targets: float | None) -> Artifact:
    """The artifact with the rows of the point that Front.choose gives; itself where all targets are None.

    All else stays: `search`, `evidence` and hashes are still those of the file and its own rows.

    Raises:
        HeadwiseError: there is no front, or see Front.choose.
    """
    given = [name for name, value in targets.items() if value is not None]
    if not given:
        return artifact
    if artifact.prefill.front is None:
        raise HeadwiseError(
            f"{given[0]}: the artifact has no front to choose from: load it without, or search with one budget for the "
            "whole model"
        )
    layers = artifact.prefill.front.choose(**targets).layers
    return artifact.model_copy(update={"prefill": artifact.prefill.model_copy(update={"layers": layers})})
