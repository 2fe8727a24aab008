"""The front: settings between fast and exact; loading selects one of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import isclose
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from artifacts.errors import HeadwiseError, shorten
from artifacts.schema.fields import AtLeast0, Count, Items, Natural, Positive, Record, Rows, Share

MAX_POINTS = 3
# Requests for a point of a front.
POINT = "lost=X, speedup=X, kl=X or recall=X with a number X from 0 on"


class Point(Record):
    """One setting of all heads, with its cost and loss."""

    cost: Positive = Field(
        description="predicted, of all layers' attention and index builds on one prompt"
    )
    speedup: Positive = Field(
        description="`dense_cost` over `cost`: predicted, and of attention alone"
    )
    kl: AtLeast0 = Field(
        description="mean divergence of the next token's distribution from dense, nats a token"
    )
    recall: Share = Field(description="attention mass kept, mean over the searched heads")
    density: Share = Field(description="of the causal area computed, mean over the searched heads")
    dense_tail: Natural | None = Field(
        default=None, description="that goes with its rows; null: that of `prefill`"
    )
    lost: float | None = Field(
        default=None,
        description=(
            "upper bound of the fraction of dense attention's correct answers that is lost: of the "
            "point that the last gate accepted its bound at 95% confidence, of the others that "
            "bound times the predicted ratio of the losses, at least 0, and of cheaper ones at "
            "least that bound; null: no answers were asked for, or no ratio is known"
        ),
    )
    layers: Rows | None = Field(
        description="as `prefill.layers`, null for the same layers; null: `prefill.layers` itself"
    )


class Front(Record):
    """Points that none of the others beats in both cost and divergence, the cheapest first."""

    length: Count = Field(description="of the prompts that the figures are for, in tokens")
    unit: Literal["seconds", "flops"] = Field(
        description="of all costs in the front; seconds are of `search.cost.device`"
    )
    dense_cost: Positive = Field(
        description=(
            "of dense attention, of both kernels the better where both were "
            "timed: all layers, one prompt"
        )
    )
    measured_on: Literal["calibration", "held_out"] = Field(
        description="the prompts of `kl` and `recall`"
    )
    points: Annotated[Items[Point], Field(min_length=1, max_length=MAX_POINTS)] = Field(
        description="ascending in cost and descending in kl: none is beaten in both; at most 3"
    )

    @property
    def rows(self) -> Iterator[tuple[int, Rows]]:
        """Number and rows of each point that has other rows than `prefill.layers`."""
        for i, point in enumerate(self.points):
            if point.layers is not None:
                yield i, point.layers

    @model_validator(mode="after")
    def _sorted(self) -> Self:
        for i, (a, b) in enumerate(pairwise(self.points), start=1):
            if b.cost <= a.cost:
                raise ValueError(
                    f"points must get dearer, but points[{i}] costs {b.cost:g} after {a.cost:g}"
                )
            if b.kl >= a.kl:
                raise ValueError(
                    f"points[{i}] costs more than the one before without being better (kl {b.kl:g} "
                    f"after {a.kl:g}): leave it out"
                )
        for i, point in enumerate(self.points):
            if not isclose(point.speedup, expected := self.dense_cost / point.cost, rel_tol=1e-3):
                raise ValueError(
                    f"points[{i}].speedup is {point.speedup:g}, dense_cost over cost is "
                    f"{expected:g}"
                )
        if len(self.points) - len(list(self.rows)) > 1:
            raise ValueError("only one of the points can have the rows of prefill.layers (null)")
        return self

    def choose(self, point: str) -> Point:
        """Return the best point that meets a request (see read_point).

        Raises:
            HeadwiseError: `point` is not a POINT, or no point of the front meets it.
        """
        request = read_point(point)
        if request is None:
            raise HeadwiseError(f"point must be {POINT}, got {shorten(point)}")
        name, limit = request
        match name:
            case "speedup":
                # The most expensive point that is fast enough is the nearest to dense.
                met = [each for each in reversed(self.points) if each.speedup >= limit]
            case "lost":
                met = [each for each in self.points if each.lost is not None and each.lost <= limit]
            case "kl":
                met = [each for each in self.points if each.kl <= limit]
            case _:
                met = [each for each in self.points if each.recall >= limit]
        if not met:
            raise HeadwiseError(f"no point of the front meets {name}={limit:g}: {self.offers()}")
        return met[0]

    def offers(self) -> str:
        """Return the ranges of the points in one line."""
        recalls = [point.recall for point in self.points]
        losses = [point.lost for point in self.points if point.lost is not None]
        lost = ""
        if losses:
            lost = f"lost from {min(losses):.3g} to {max(losses):.3g}, "
        first = self.points[0]
        last = self.points[-1]
        return (
            f"its points have {lost}speedups of attention from {last.speedup:.3g} to "
            f"{first.speedup:.3g}, kl from {last.kl:.3g} to {first.kl:.3g} nats a token and recall "
            f"from {min(recalls):.3g} to {max(recalls):.3g}, at {self.length:,} tokens"
        )


def read_point(point: str) -> tuple[str, float] | None:
    """Parse a request for a point of a front; None if it is not a POINT.

    Args:
        point: one of these forms. "lost=0.02" selects the fastest point whose bound of lost answers
            is at most 2% of dense attention's correct ones. "speedup=1.5" selects the smallest kl
            among points with attention at least 1.5 times as fast as dense. "kl=0.01" selects the
            fastest point within 0.01 nats a token of dense. "recall=0.95" selects the fastest point
            with at least 0.95 of the attention mass.
    """
    name, _, number = str(point).partition("=")
    try:
        limit = float(number)
    except ValueError:
        return None
    if name not in ("lost", "speedup", "kl", "recall") or not limit >= 0:
        return None
    return name, limit
