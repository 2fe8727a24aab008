"""Plain data to an Artifact, and pydantic's errors as one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from artifacts.errors import ArtifactError, shorten
from artifacts.schema.artifact import Artifact

# pydantic makes half a kilobyte of each error that is asked for.
_TOO_MANY = 5_000
_LONGEST_KEY = 80


def to_artifact(fields: Mapping[str, Any]) -> Artifact:
    """The artifact of a mapping as it was read from YAML.

    Raises:
        ArtifactError: one line with the first wrong field's path, what would be right, its value,
            and how many more are wrong.
    """
    try:
        return Artifact.model_validate(fields)
    except ValidationError as error:
        raise ArtifactError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """`location: message, got input` of the first of pydantic's errors, and how many more."""
    count = error.error_count()
    if count > _TOO_MANY:
        return f"{count} fields are not as the schema has them, is this an artifact?"
    first = error.errors(include_url=False, include_context=False)[0]
    line = first["msg"].removeprefix("Value error, ")
    if first["loc"]:
        line = f"{_path(first['loc'])}: {line}"
    # A check of several fields names their values itself.
    if not isinstance(first["input"], Mapping):
        line += f", got {shorten(first['input'])}"
    if count > 1:
        line += f" (and {count - 1} more)"
    return line


def _path(loc: tuple[int | str, ...]) -> str:
    """prefill.layers[3][2] of ('prefill', 'layers', 3, 2)."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_KEY]}" for part in loc]
    return "".join(parts).removeprefix(".")
