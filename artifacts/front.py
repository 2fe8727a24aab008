"""The front: settings of the same model between fast and exact, of which one is chosen when it is loaded.

The YAML has a line for each point; the points' rows are the array `front.rows` of the sidecar: int16 of shape
(points, layers, query heads), where a number is a place in the names of `patterns` in ascending order, and -1 a layer
that is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isclose
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from artifacts.errors import ArtifactError, HeadwiseError
from artifacts.evidence import check_lost
from artifacts.fields import AtLeast0, Count, Natural, Positive, Record, Rows, Share

if TYPE_CHECKING:
    from artifacts.schema import Artifact
    from artifacts.sidecar import Array

MAX_POINTS = 32
FRONT_ROWS = "front.rows"


class Point(Record):
    """What one setting of all heads costs and loses; its rows are in the sidecar."""

    cost: Positive = Field(description="predicted, of all layers' attention and index builds on one prompt")
    speedup: Positive = Field(description="`dense_cost` over `cost`: predicted, and of attention alone")
    kl: AtLeast0 = Field(description="mean divergence of the next token's distribution from dense, nats a token")
    recall: Share = Field(description="attention mass kept, mean over the searched heads")
    density: Share = Field(description="of the causal area computed, mean over the searched heads")
    dense_tail: Natural | None = Field(default=None, description="that goes with its rows; null: that of `prefill`")
    lost: Natural | None = Field(
        default=None, description="of the answers that dense attention gets right (`dense_right`), those that are lost"
    )


class Front(Record):
    """Points that none of the others beats in both cost and divergence, the cheapest first."""

    length: Count = Field(description="of the prompts that the figures are for, in tokens")
    unit: Literal["seconds", "flops"] = Field(
        description="of all costs in the front; seconds are of `search.cost.device`"
    )
    dense_cost: Positive = Field(
        description="of dense attention, of both kernels the better where both were timed: all layers, one prompt"
    )
    dense_right: Natural | None = Field(
        default=None, description="prompts that dense attention answers right; null where answers were not asked for"
    )
    measured_on: Literal["calibration", "held_out"] = Field(description="the prompts of `kl`, `recall` and `lost`")
    points: Annotated[tuple[Point, ...], Field(min_length=1, max_length=MAX_POINTS)] = Field(
        description="ascending in cost and descending in kl: none is beaten in both; at most 32"
    )

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
            check_lost(point.lost, self.dense_right)
        return self

    def choose(
        self,
        *,
        target_speedup: float | None = None,
        target_kl: float | None = None,
        target_recall: float | None = None,
    ) -> int:
        """The number of the best point for one target.

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
        points = list(enumerate(self.points))
        match name:
            case "target_speedup":
                # The dearest of those that are fast enough is the nearest to dense.
                met = [i for i, point in reversed(points) if point.speedup >= target]
            case "target_kl":
                met = [i for i, point in points if point.kl <= target]
            case _:
                met = [i for i, point in points if point.recall >= target]
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


def front_arrays(patterns: Iterable[str], rows: Sequence[Rows]) -> dict[str, Array]:
    """The sidecar's array for a front whose points have these rows, in the order of the points.

    Args:
        patterns: the names of the artifact's patterns.
        rows: of each point as in prefill.layers.

    Raises:
        ArtifactError: a row names no pattern, or rows are of unlike lengths.
    """
    import numpy as np

    number = {name: i for i, name in enumerate(sorted(patterns))}
    heads = max((len(row) for point in rows for row in point if row is not None), default=1)
    left_alone = (-1,) * heads
    try:
        listed = [
            [left_alone if row is None else tuple(number[name] for name in row) for row in point] for point in rows
        ]
        return {FRONT_ROWS: np.array(listed, dtype=np.int16).reshape(len(rows), -1, heads)}
    except KeyError as error:
        raise ArtifactError(f"the front names {error}, which patterns does not hold") from None
    except ValueError:
        raise ArtifactError("the front's points have rows of unlike lengths") from None


def front_rows(artifact: Artifact, arrays: Mapping[str, Array] | None, point: int) -> Rows:
    """The rows of a point, as in prefill.layers.

    Raises:
        ArtifactError: the sidecar has no rows of the front.
    """
    table = (arrays or {}).get(FRONT_ROWS)
    if table is None:
        raise ArtifactError(f"the sidecar has no array {FRONT_ROWS}, and the points' rows are there")
    names = sorted(artifact.patterns)
    return tuple(None if row[0] < 0 else tuple(names[number] for number in row) for row in table[point].tolist())


def served_point(artifact: Artifact, arrays: Mapping[str, Array] | None) -> int | None:
    """The number of the point whose rows are those of prefill.layers; None where it is none, or they are not there."""
    table = (arrays or {}).get(FRONT_ROWS)
    if table is None or artifact.prefill.front is None:
        return None
    served = front_arrays(artifact.patterns, [artifact.prefill.layers])[FRONT_ROWS][0]
    return next((i for i, rows in enumerate(table) if rows.shape == served.shape and (rows == served).all()), None)


def at_target(artifact: Artifact, arrays: Mapping[str, Array] | None = None, **targets: float | None) -> Artifact:
    """The artifact with the rows of the point that Front.choose gives; itself where all targets are None.

    All else stays: `search`, `evidence` and hashes are still those of the file and its own rows.

    Args:
        artifact: with a front.
        arrays: the sidecar's, `front.rows` among them.
        targets: see Front.choose.

    Raises:
        HeadwiseError: there is no front, or see Front.choose.
        ArtifactError: the sidecar has no rows of the front.
    """
    given = [name for name, value in targets.items() if value is not None]
    if not given:
        return artifact
    if artifact.prefill.front is None:
        raise HeadwiseError(
            f"{given[0]}: the artifact has no front to choose from: load it without, or search with one budget for the "
            "whole model"
        )
    number = artifact.prefill.front.choose(**targets)
    served: dict[str, object] = {"layers": front_rows(artifact, arrays, number)}
    if (tail := artifact.prefill.front.points[number].dense_tail) is not None:
        served["dense_tail"] = tail
    return artifact.model_copy(update={"prefill": artifact.prefill.model_copy(update=served)})
