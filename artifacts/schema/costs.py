"""Devices whose cost tables an artifact carries; the tables are arrays of its sidecar."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from artifacts.schema.fields import Items, Record, Text

Names = Annotated[Items[Text], Field(min_length=1)]


class DeviceCosts(Record):
    """Cost table of one device and backend; the i-th has its columns in `cost.<i>.<column>`."""

    device: Text = Field(description="the machine whose seconds they are")
    backend: Text = Field(description="the attention kernels that were timed")
    versions: dict[str, str] = Field(description="of what the seconds depend on")
    command: Text = Field(description="measures them again")
    optimised: bool = Field(
        description="the search's objective was made of this table; of at most one"
    )
    patterns: Names = Field(description="what the numbers in the column `pattern` stand for")
    dtypes: Names = Field(description="what the numbers in the column `dtype` stand for")
