"""Checks of required arrays: static patterns, cost tables, the front, seen windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from artifacts.errors import ArtifactError, shorten
from artifacts.schema.artifact import Artifact
from artifacts.schema.patterns import AnyPattern, Static
from artifacts.store.front_rows import FRONT_ROWS
from artifacts.store.windows import SEEN_WINDOWS

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array, Entry

T = TypeVar("T")
# A static pattern for prompts of 2^31 tokens could not use more.
MAX_POSITIONS = 2**22


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
    check_static(artifact.patterns, arrays, entries)
    for number in range(len(artifact.costs)):
        if fault := _cost_fault(number, entries or arrays or {}):
            raise ArtifactError(f"costs[{number}]: {fault}")
    if fault := _front_fault(artifact, arrays or {}, entries):
        raise ArtifactError(f"prefill.front: {fault}")
    if fault := _windows_fault(artifact, entries or arrays or {}):
        raise ArtifactError(f"search.calibration.seen_windows: {fault}")


def check_static(
    patterns: Mapping[str, AnyPattern],
    arrays: Mapping[str, Array] | None,
    entries: Mapping[str, Entry] | None = None,
) -> None:
    """Check that every static pattern has its arrays, and that they list positions.

    Raises:
        ArtifactError: the first that is missing or is not one row of ascending int32 positions from
            0 on.
    """
    looked_at = set[str]()
    for name, pattern in patterns.items():
        if isinstance(pattern, Static) and pattern.indices not in looked_at:
            looked_at.add(pattern.indices)
            for array in pattern.arrays:
                if fault := _static_fault(array, arrays, entries):
                    raise ArtifactError(f"patterns.{name}: {fault}")


def needed(artifact: Artifact) -> Iterator[str]:
    """The names of the arrays without which the artifact's patterns cannot be applied."""
    for pattern in artifact.patterns.values():
        if isinstance(pattern, Static):
            yield from pattern.arrays
    if artifact.prefill.front is not None:
        yield FRONT_ROWS


def columns(arrays: Mapping[str, T], number: int) -> dict[str, T]:
    """The columns of the table with that number, by name; empty where there are none."""
    begins = f"cost.{number}."
    return {
        name.removeprefix(begins): array
        for name, array in arrays.items()
        if name.startswith(begins)
    }


def _static_fault(
    name: str, arrays: Mapping[str, Array] | None, entries: Mapping[str, Entry] | None
) -> str | None:
    if arrays is None:
        return f"the array {name} must be in the sidecar, and there is none"
    if name not in arrays:
        near = sorted(other for other in arrays if other.startswith("static."))[:3]
        return (
            f"the sidecar has no array {name}; of static patterns it has: "
            f"{', '.join(near) or 'none'}"
        )
    entry = (entries or arrays)[name]
    if entry.dtype != "int32" or len(entry.shape) != 1:
        return f"{name} must be one row of int32, got {entry.dtype} of shape {entry.shape}"
    if entry.size > MAX_POSITIONS:
        return f"{name} has {entry.size} positions, a static pattern may have {MAX_POSITIONS}"
    array = arrays[name]
    if array.size and array[0] < 0:
        return f"{name} must hold positions from 0 on, got {array[0]}"
    rising = array[1:] > array[:-1]
    if not rising.all():
        at = int(rising.argmin()) + 1
        return f"{name} must be ascending, got {array[at]} after {array[at - 1]}"
    return None


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
