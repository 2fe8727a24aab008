"""Checks of required arrays: cost tables, the front, seen windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from artifacts.errors import ArtifactError, shorten
from artifacts.schema.artifact import Artifact
from artifacts.store.front_rows import FRONT_ROWS
from artifacts.store.windows import SEEN_WINDOWS

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array, Entry

T = TypeVar("T")


def check_arrays(
    artifact: Artifact,
    arrays: Mapping[str, Array] | None,
    entries: Mapping[str, Entry] | None = None,
) -> None:
    """Check the arrays of every section that needs some.

    Args:
        artifact: whose sections.
        arrays: the sidecar's; None where there is none.
        entries: their dtypes and shapes, which are enough for those that nothing here looks into;
            None asks the arrays.

    Raises:
        ArtifactError: the first that is missing or not as it has to be.
    """
    for number in range(len(artifact.costs)):
        if fault := _cost_fault(number, entries or arrays or {}):
            raise ArtifactError(f"costs[{number}]: {fault}")
    if fault := _front_fault(artifact, arrays or {}, entries):
        raise ArtifactError(f"prefill.front: {fault}")
    if fault := _windows_fault(artifact, entries or arrays or {}):
        raise ArtifactError(f"search.calibration.seen_windows: {fault}")


def columns(arrays: Mapping[str, T], number: int) -> dict[str, T]:
    """The columns of the table with that number, by name; empty where there are none."""
    begins = f"cost.{number}."
    return {
        name.removeprefix(begins): array
        for name, array in arrays.items()
        if name.startswith(begins)
    }


def _cost_fault(number: int, arrays: Mapping[str, Any]) -> str | None:
    table = columns(arrays, number)
    if not table:
        return f"the sidecar has no arrays cost.{number}.*"
    shapes: set[tuple[int, ...]] = {array.shape for array in table.values()}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1 or not next(iter(shapes))[0]:
        return f"the arrays cost.{number}.* must be columns of one length, got {sorted(shapes)}"
    return None


def _front_fault(
    artifact: Artifact, arrays: Mapping[str, Array], entries: Mapping[str, Entry] | None
) -> str | None:
    front = artifact.prefill.front
    model = artifact.model
    if front is None:
        return None
    if FRONT_ROWS not in arrays:
        return f"the sidecar has no array {FRONT_ROWS}, and the points' rows are there"
    shape = (len(front.points), model.num_layers, model.num_heads)
    entry = (entries or arrays)[FRONT_ROWS]
    if entry.dtype != "int16" or entry.shape != shape:
        return (
            f"{FRONT_ROWS} must be int16 of shape {shape}, got {entry.dtype} of shape {entry.shape}"
        )
    table = arrays[FRONT_ROWS]
    alone = [row is None for row in artifact.prefill.layers]
    if ((table < 0) != [[[left] for left in alone]]).any():
        return (
            f"{FRONT_ROWS} must leave alone (-1) the layers that "
            f"prefill.layers leaves alone, and no others"
        )
    if table.max(initial=-1) >= len(artifact.patterns):
        return (
            f"{FRONT_ROWS} names pattern {table.max()}, there are "
            f"{len(artifact.patterns)} from 0 on"
        )
    used = {name for row in artifact.prefill.layers for name in row or ()}
    names = sorted(artifact.patterns)
    used |= {names[number] for number in set(table.ravel().tolist()) if number >= 0}
    if unused := next((name for name in names if name not in used), None):
        return (
            f"patterns.{shorten(unused)} is used by no head, of "
            f"prefill.layers or of a point: remove it"
        )
    return None


def _windows_fault(artifact: Artifact, arrays: Mapping[str, Any]) -> str | None:
    if artifact.search is None:
        count = 0
    else:
        count = artifact.search.calibration.seen_windows
    table = arrays.get(SEEN_WINDOWS)
    if table is None:
        if count:
            return f"says {count}, and the sidecar has no array {SEEN_WINDOWS}"
        return None
    if table.dtype != "uint8" or table.shape != (count, 32):
        return (
            f"{SEEN_WINDOWS} must be uint8 of shape {(count, 32)}, got "
            f"{table.dtype} of shape {table.shape}"
        )
    return None
