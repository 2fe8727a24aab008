"""Which devices' cost tables an artifact carries; the tables are arrays of its sidecar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import Field

from artifacts.fields import Record, Text

if TYPE_CHECKING:
    from artifacts.sidecar import Array

T = TypeVar("T")
Names = Annotated[tuple[Text, ...], Field(min_length=1)]


class DeviceCosts(Record):
    """The cost table of one device and kernel backend; the i-th has its columns in the arrays
    `cost.<i>.<column>`."""

    device: Text = Field(description="the machine whose seconds they are")
    backend: Text = Field(description="the attention kernels that were timed")
    versions: dict[str, str] = Field(description="of what the seconds depend on")
    command: Text = Field(description="measures them again")
    optimised: bool = Field(
        description="the search's objective was made of this table; of at most one"
    )
    patterns: Names = Field(description="what the numbers in the column `pattern` stand for")
    dtypes: Names = Field(description="what the numbers in the column `dtype` stand for")


def columns(arrays: Mapping[str, T], number: int) -> dict[str, T]:
    """The columns of the table with that number, by name; empty where there are none."""
    begins = f"cost.{number}."
    return {
        name.removeprefix(begins): array
        for name, array in arrays.items()
        if name.startswith(begins)
    }


def with_others(
    own: Sequence[DeviceCosts], others: Sequence[DeviceCosts], arrays: Mapping[str, Array]
) -> tuple[tuple[DeviceCosts, ...], dict[str, Array]]:
    """The tables of `own` and after them the `others` of other devices and backends, with these
    ones' arrays.

    What a device costs is so whatever was searched; what the search counted by is said by `own`
    alone."""
    known = {(table.device, table.backend) for table in own}
    section = list(own)
    found: dict[str, Array] = {}
    for number, table in enumerate(others):
        if (table.device, table.backend) not in known:
            found |= {
                f"cost.{len(section)}.{name}": array
                for name, array in columns(arrays, number).items()
            }
            section.append(table.model_copy(update={"optimised": False}))
    return tuple(section), found
