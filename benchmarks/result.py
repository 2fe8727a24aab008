"""Result files, of which docs/results has one for each measurement: the schema, reading, writing.

    what      what was measured, in a sentence
    command   the command that measures it
    commit    the commit that it ran at; of a file without one, the commit that added its figures
    machine   the processor or GPU, and what else ran
    versions  of packages, by name
    rows      the figures

A field of a row is a value, a list of values, or one level of names with either. Where a file has
rows of several sorts, `part` names the sort.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts import HeadwiseError
from artifacts.errors import one_line
from artifacts.files import atomic_write

RESULTS = Path(__file__).resolve().parents[1] / "docs/results"
UNKNOWN = "not recorded"

Value = str | int | float | bool | None
Values = Value | list[Value]
Row = dict[str, Values | dict[str, Values]]


class Result(BaseModel):
    """The content of a result file.

    Attributes:
        what: what was measured.
        command: the command that measures it.
        commit: the commit that it ran at.
        machine: the processor or GPU, and what else ran.
        versions: of packages and of the processor's instructions, by name.
        rows: the figures.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    what: str = Field(min_length=1)
    command: str = Field(min_length=1)
    commit: str = Field(min_length=1)
    machine: str = Field(min_length=1)
    versions: dict[str, str]
    rows: list[Row] = Field(min_length=1)

    def part(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of one sort."""
        return [row for row in self.rows if row.get("part") == name]


def read(path: Path) -> Result:
    """Read a result file.

    Raises:
        HeadwiseError: the file cannot be read, or has another schema.
    """
    try:
        return Result.model_validate_json(path.read_bytes())
    except OSError as error:
        raise HeadwiseError(f"cannot read {one_line(str(path))}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HeadwiseError(
            f"{one_line(str(path))} is no result file: {where}: {first['msg']}"
        ) from None


def write(path: Path, result: Result) -> None:
    """Write a result file beside the old one, then replace that.

    Raises:
        HeadwiseError: the file cannot be written.
    """
    atomic_write(path, text(result).encode())


def text(result: Result) -> str:
    """Return the JSON of a result, with a line for each field and each row."""
    content = result.model_dump(mode="json")
    rows = ",\n".join(f"  {_json(row)}" for row in content.pop("rows"))
    fields = [f" {_json(name)}: {_json(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join([*fields, f' "rows": [\n{rows}\n ]']) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with at most one level of names; deeper ones are joined with dots."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
            fields |= flat({f"{name}.{key}": each for key, each in value.items()})
        else:
            fields[name] = value
    return fields


def labeled(part: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the name of their sort."""
    return [{"part": part, **flat(row)} for row in rows]


def commit() -> str:
    """Return the short hash of the commit that is checked out; UNKNOWN without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return done.stdout.strip()


def machine_of(environment: Mapping[str, str]) -> str:
    """Return the machine of a profiling.environment.environment() in a line."""
    return f"{environment['device']}, {environment['cores']} cores, {environment['capability']}"
