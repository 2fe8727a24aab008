"""Which devices' cost tables an artifact carries; the tables are arrays of its sidecar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from artifacts.errors import ArtifactError
from artifacts.imported import Text
from artifacts.patterns import Record

if TYPE_CHECKING:
    from artifacts.sidecar import Array

Names = Annotated[tuple[Text, ...], Field(min_length=1)]


class DeviceCosts(Record):
    """The cost table of one device and kernel backend; the i-th has its columns in the arrays `cost.<i>.<column>`.

    patterns, dtypes: what the numbers in the columns `pattern` and `dtype` stand for. optimised: whether the search's
    objective was made of it.
    """

    device: Text
    backend: Text
    versions: dict[str, str]
    command: Text
    optimised: bool
    patterns: Names
    dtypes: Names


def columns(arrays: Mapping[str, Array], number: int) -> dict[str, Array]:
    """The columns of the table with that number, by name; empty where there are none."""
    begins = f"cost.{number}."
    return {name.removeprefix(begins): array for name, array in arrays.items() if name.startswith(begins)}


def check_costs(costs: Sequence[DeviceCosts], arrays: Mapping[str, Array] | None) -> None:
    """Check that every table has columns, of one length.

    Raises:
        ArtifactError: the first table that is missing or no table.
    """
    for number in range(len(costs)):
        if fault := cost_fault(number, arrays or {}):
            raise ArtifactError(f"costs[{number}]: {fault}")


def with_others(
    own: Sequence[DeviceCosts], others: Sequence[DeviceCosts], arrays: Mapping[str, Array]
) -> tuple[tuple[DeviceCosts, ...], dict[str, Array]]:
    """The tables of `own` and after them the `others` of other devices and backends, with these ones' arrays.

    What a device costs is so whatever was searched; what the search counted by is said by `own` alone.
    """
    known = {(table.device, table.backend) for table in own}
    section = list(own)
    found: dict[str, Array] = {}
    for number, table in enumerate(others):
        if (table.device, table.backend) not in known:
            found |= {f"cost.{len(section)}.{name}": array for name, array in columns(arrays, number).items()}
            section.append(table.model_copy(update={"optimised": False}))
    return tuple(section), found


def cost_fault(number: int, arrays: Mapping[str, Array]) -> str | None:
    """What is wrong with the columns of a table, None where nothing is."""
    table = columns(arrays, number)
    if not table:
        return f"the sidecar has no arrays cost.{number}.*"
    shapes: set[tuple[int, ...]] = {array.shape for array in table.values()}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1 or not next(iter(shapes))[0]:
        return f"the arrays cost.{number}.* must be columns of one length, got {sorted(shapes)}"
    return None
