"""Reads the names of patterns: what artifacts.pattern_name writes, and the names of families of patterns."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from artifacts import HeadwiseError, Pattern, pattern_name
from artifacts.patterns import KINDS, NAMES, AnyPattern

_PATTERN: TypeAdapter[Pattern] = TypeAdapter(Pattern)
_SHORT = {form.partition("_")[0]: kind for kind, form in NAMES.items()}
# Fields that a name leaves out where they are as usual, by the letter that they begin with where it does not.
_LETTERS = {"q": "last_q", "c": "coverage", "r": "representatives"}


def kind_of(name: str) -> str:
    """The kind of the pattern, or of the family of patterns, that has this name; "?" for a name that is neither."""
    for kind in KINDS:
        if name == kind or name.startswith(f"{kind}_"):
            return kind
    return _SHORT.get(name.partition("_")[0], "?")


def pattern_of(name: str) -> Pattern:
    """The pattern that artifacts.pattern_name gives this name.

    Raises:
        HeadwiseError: it names none, or a static one, whose positions are in a sidecar.
    """
    short, *parts = name.split("_")
    kind = _SHORT.get(short, "?")
    fields: dict[str, Any] = {"kind": kind}
    classes = {cls.model_fields["kind"].default: cls for cls in get_args(AnyPattern)}
    try:
        for field, info in classes[kind].model_fields.items():
            if info.is_required():
                part = parts.pop(0)
                fields[field] = float(part) if info.annotation is float else int(part)
        for part in parts:
            fields[_LETTERS[part[0]]] = float(Decimal(part[1:]) / 100) if part[0] == "c" else int(part[1:])
        pattern = _PATTERN.validate_python(fields)
    except (IndexError, InvalidOperation, KeyError, ValueError, ValidationError):
        raise HeadwiseError(f"{name!r} is not the name of a pattern, such as vs_512_1024") from None
    if pattern_name(pattern) != name:
        raise HeadwiseError(f"{name!r} is not the name of a pattern: that would be {pattern_name(pattern)}")
    return pattern


def sized(name: str, sizes: dict[str, int]) -> Pattern:
    """The pattern of the kind that `name` tells, with these sizes."""
    return _PATTERN.validate_python({"kind": kind_of(name), **sizes})
