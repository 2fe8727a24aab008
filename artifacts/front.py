"""The front: settings of the same model between fast and exact, of which one is chosen when it is loaded."""

from __future__ import annotations

from itertools import pairwise
from math import isclose
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from artifacts.errors import HeadwiseError
from artifacts.fields import Count, Positive, Rows, Share
from artifacts.patterns import Record

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
            target_speedup: at least so many times dense attention's speed: of these the one with the least kl.
            target_kl: at most so many nats a token from dense: of these the fastest.
            target_recall: at least this share of the attention mass kept: of these the fastest.

        Raises:
            HeadwiseError: no target or several, one that is out of range, or one that no point meets.
        """
        given = {"target_speedup": target_speedup, "target_kl": target_kl, "target_recall": target_recall}
        targets = {name: value for name, value in given.items() if value is not None}
        if len(targets) != 1:
            raise HeadwiseError(f"give one of {', '.join(given)}, got {', '.join(targets) or 'none'}")
        name, target = targets.popitem()
        if not (isinstance(target, int | float) and not isinstance(target, bool) and target >= 0):
            raise HeadwiseError(f"{name} must be a number from 0 on, got {target!r}")
        if name == "target_speedup":
            met, offers = [p for p in self.points if p.speedup >= target], max(p.speedup for p in self.points)
            said = f"the fastest point is {offers:.4g}x dense attention's speed"
            # The dearest of them is the best.
            met.reverse()
        elif name == "target_kl":
            met, offers = [p for p in self.points if p.kl <= target], min(p.kl for p in self.points)
            said = f"the most exact point has a kl of {offers:.4g} nats a token"
        else:
            met, offers = [p for p in self.points if p.recall >= target], max(p.recall for p in self.points)
            said = f"the highest recall of a point is {offers:.4g}"
        if not met:
            raise HeadwiseError(f"no point of the front meets {name} {target:g}: {said} (at {self.length:,} tokens)")
        return met[0]
