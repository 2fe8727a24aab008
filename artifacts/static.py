"""The arrays of an artifact's static patterns: that they are there, and that they are lists of positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError
from artifacts.patterns import AnyPattern, Static

if TYPE_CHECKING:
    from artifacts.sidecar import Array


def check_static(patterns: Mapping[str, AnyPattern], arrays: Mapping[str, Array] | None) -> None:
    """Check the arrays of every static pattern.

    Args:
        patterns: by name.
        arrays: those of the sidecar; None where there is no sidecar.

    Raises:
        ArtifactError: the first that is missing or is not one row of ascending int32 positions from 0 on.
    """
    for name, pattern in patterns.items():
        if isinstance(pattern, Static):
            for array in pattern.arrays:
                if fault := _fault(array, arrays):
                    raise ArtifactError(f"patterns.{name}: {fault}")


def has_static(patterns: Iterable[AnyPattern]) -> bool:
    """Whether any of the patterns needs the sidecar."""
    return any(isinstance(pattern, Static) for pattern in patterns)


def _fault(name: str, arrays: Mapping[str, Array] | None) -> str | None:
    if arrays is None:
        return f"the array {name} must be in the sidecar, and there is none"
    if name not in arrays:
        near = sorted(other for other in arrays if other.startswith("static."))[:3]
        return f"the sidecar has no array {name}; of static patterns it has: {', '.join(near) or 'none'}"
    array = arrays[name]
    if array.dtype != "int32" or array.ndim != 1:
        return f"{name} must be one row of int32, got {array.dtype} of shape {array.shape}"
    if array.size and array[0] < 0:
        return f"{name} must hold positions from 0 on, got {array[0]}"
    rising = array[1:] > array[:-1]
    if not rising.all():
        at = int(rising.argmin()) + 1
        return f"{name} must be ascending, got {array[at]} after {array[at - 1]}"
    return None
