"""Patterns of each head at each point of a front.

The array `front.rows` of the sidecar holds them: int16 of shape (points, layers, query heads). A
number is an index into the sorted names of `patterns`, and -1 marks a layer without patterns.
"""

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
    """Make the sidecar array of a front from the rows of its points.

    Args:
        patterns: names of the artifact's patterns.
        rows: rows of each point in order, as in prefill.layers.

    Raises:
        ArtifactError: a row names an unknown pattern, or rows differ in length.
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
    """Return the rows of a point, as in prefill.layers.

    Raises:
        ArtifactError: the sidecar has no rows of the front.
    """
    table = (arrays or {}).get(FRONT_ROWS)
    if table is None:
        raise ArtifactError(f"the sidecar has no array {FRONT_ROWS}, which holds the points' rows")
    names = sorted(artifact.patterns)
    return tuple(
        None if row[0] < 0 else tuple(names[number] for number in row)
        for row in table[point].tolist()
    )


def served_point(artifact: Artifact, arrays: Mapping[str, Array] | None) -> int | None:
    """Number of the point with the rows of prefill.layers; None without a match or array."""
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
    """Return the artifact with the rows of a point of its front; unchanged if `point` is None.

    All other fields are unchanged: `search`, `evidence` and the hashes still describe the rows in
    the file.

    Args:
        artifact: artifact with a front.
        arrays: arrays of the sidecar, including `front.rows`.
        point: request for a point (see read_point).

    Raises:
        HeadwiseError: the artifact has no front, or as in Front.choose.
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
