"""Plain data to an Artifact; pydantic's errors to one line with field, value and remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from artifacts.errors import ArtifactError, shorten
from artifacts.schema.artifact import Artifact
from artifacts.schema.kv_cache import POLICY_KINDS
from artifacts.schema.patterns import KINDS

# pydantic makes half a kilobyte of each error, and another of each that is asked for; none helps
# beside so many.
_TOO_MANY = 5_000

# By the name of the mapping whose entries have a kind.
_KINDS = {"patterns": KINDS, "policies": POLICY_KINDS}
_WANTED = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be valid Unicode text",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "must be one of {expected_tags}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


def to_artifact(fields: Mapping[str, Any]) -> Artifact:
    """The artifact of a mapping as it was read from YAML.

    Raises:
        ArtifactError: one line with the first wrong field's path, its value, what would be right,
            and how many more are wrong.
    """
    try:
        # The JSON mode is as strict as the Python mode, but takes a list for a tuple: YAML has no
        # tuples.
        return Artifact.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise ArtifactError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """One line for the first of pydantic's errors, unknown fields first, and "and N more"."""
    if error.error_count() > _TOO_MANY:
        return f"{error.error_count()} fields are not as the schema has them, is this an artifact?"
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    line = _describe(first, details)
    if len(details) == 1:
        return line
    return f"{line} (and {len(details) - 1} more)"


def _describe(detail: ErrorDetails, errors: Sequence[ErrorDetails]) -> str:
    kind = detail["type"]
    value = detail["input"]
    context = detail.get("ctx", {})
    where = _path(detail["loc"])
    if kind == "missing":
        return f"{where}: missing"
    if kind == "extra_forbidden":
        # A misspelt field is missing under its right name, unless it has a default, as some at the
        # top have.
        beside = [
            d["loc"][-1]
            for d in errors
            if d["type"] == "missing" and d["loc"][:-1] == detail["loc"][:-1]
        ]
        fields = [*map(str, beside), *(Artifact.model_fields if len(detail["loc"]) == 1 else ())]
        near = difflib.get_close_matches(str(detail["loc"][-1])[:64], fields[:256], n=1)
        if near:
            hint = f", did you mean {near[0]}?"
        else:
            hint = ""
        return f"{where}: unknown field" + hint
    if kind == "union_tag_not_found":
        return f"{where}.kind: missing, must be one of {', '.join(_KINDS[str(detail['loc'][-2])])}"
    if kind == "union_tag_invalid":
        where = f"{where}.kind"
        value = context["tag"]
    if kind == "value_error":
        message = str(context["error"])
        if isinstance(value, dict | list):
            # A check of several fields together, whose message has the values.
            if where:
                return f"{where}: {message}"
            return message
        return f"{where}: {message}, got {_shown(value)}"
    wanted = _WANTED.get(kind, detail["msg"].replace("Input should be", "must be"))
    return f"{where}: {wanted.format(**context)}, got {_shown(value)}"


def _shown(value: object) -> str:
    """As YAML has it: true and null, not Python's names for them."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return shorten(value)


def _path(loc: Sequence[int | str]) -> str:
    """prefill.layers[3][2] of ('prefill', 'layers', 3, 2), without tags of alternatives."""
    parts = [part for part in loc if not (isinstance(part, str) and part.startswith("["))]
    for i, (place, _, kind) in enumerate(zip(parts, parts[1:], parts[2:], strict=False)):
        if kind in _KINDS.get(str(place), ()):
            del parts[i + 2]
            break
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            if path:
                path += f".{_quoted(part)}"
            else:
                path += _quoted(part)
    return path


def _quoted(key: str) -> str:
    plain = all(c.isalnum() or c in "_.-" for c in key)
    if plain and 0 < len(key) < 65:
        return key
    return shorten(key, 40)
