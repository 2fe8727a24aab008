"""Patterns of each head at each point of a front.

They are the array `front.rows` of the sidecar: int16 of shape (points, layers, query heads), where
a number is a place in the names of `patterns` in ascending order, and -1 a layer that is left
alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, HeadwiseError, shorten
from artifacts.schema.artifact import Artifact
from artifacts.schema.fields import Rows

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

FRONT_ROWS = "front.rows"


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
            [left_alone if row is None else tuple(number[name] for name in row) for row in point]
            for point in rows
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
        raise ArtifactError(
            f"the sidecar has no array {FRONT_ROWS}, and the points' rows are there"
        )
    names = sorted(artifact.patterns)
    return tuple(
        None if row[0] < 0 else tuple(names[number] for number in row)
        for row in table[point].tolist()
    )


def served_point(artifact: Artifact, arrays: Mapping[str, Array] | None) -> int | None:
    """Number of the point whose rows prefill.layers has; None if there is none or no array."""
    table = (arrays or {}).get(FRONT_ROWS)
    if table is None or artifact.prefill.front is None:
        return None
    served = front_arrays(artifact.patterns, [artifact.prefill.layers])[FRONT_ROWS][0]
    return next(
        (
            i
            for i, rows in enumerate(table)
            if rows.shape == served.shape and (rows == served).all()
        ),
        None,
    )


def at_point(artifact: Artifact, arrays: Mapping[str, Array] | None, point: str | None) -> Artifact:
    """Artifact with the rows of the point that Front.choose returns; unchanged if `point` is None.

    All else stays: `search`, `evidence` and hashes are still those of the file and its own rows.

    Args:
        artifact: with a front.
        arrays: the sidecar's, `front.rows` among them.
        point: see read_point.

    Raises:
        HeadwiseError: there is no front, or see Front.choose.
        ArtifactError: the sidecar has no rows of the front.
    """
    if point is None:
        return artifact
    if artifact.prefill.front is None:
        raise HeadwiseError(
            f"point {shorten(point)}: the artifact has no front to choose from: load it without, "
            "or search with one budget for the whole model"
        )
    number = artifact.prefill.front.choose(point)
    served: dict[str, object] = {"layers": front_rows(artifact, arrays, number)}
    if (tail := artifact.prefill.front.points[number].dense_tail) is not None:
        served["dense_tail"] = tail
    return artifact.model_copy(update={"prefill": artifact.prefill.model_copy(update=served)})
