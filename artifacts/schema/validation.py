"""Validation of plain data as an Artifact, with pydantic's errors in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from artifacts.errors import ArtifactError, shorten
from artifacts.schema.artifact import Artifact

# pydantic builds half a kilobyte for each requested error.
_TOO_MANY = 5_000
_LONGEST_KEY = 80


def to_artifact(fields: Mapping[str, Any]) -> Artifact:
    """Convert a mapping from a YAML file to an artifact.

    Raises:
        ArtifactError: a field is invalid. The message is one line with the path of the first
            invalid field, the allowed values, its value, and the number of further errors.
    """
    try:
        return Artifact.model_validate(fields)
    except ValidationError as error:
        raise ArtifactError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """Format the first pydantic error as `location: message, got input`, and count the rest."""
    count = error.error_count()
    if count > _TOO_MANY:
        return f"{count} fields are not as the schema has them, is this an artifact?"
    first = error.errors(include_url=False, include_context=False)[0]
    line = first["msg"].removeprefix("Value error, ")
    if first["loc"]:
        line = f"{_path(first['loc'])}: {line}"
    # The message of a check of several fields already has their values.
    if not isinstance(first["input"], Mapping):
        line += f", got {shorten(first['input'])}"
    if count > 1:
        line += f" (and {count - 1} more)"
    return line


def _path(loc: tuple[int | str, ...]) -> str:
    """Format a location: prefill.layers[3][2] for ('prefill', 'layers', 3, 2)."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_KEY]}" for part in loc]
    return "".join(parts).removeprefix(".")
