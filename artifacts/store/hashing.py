"""Hashes that depend on content only: not on key order, file layout, time or command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

# Whole numbers up to here are exact as the floats that JSON readers make of them.
_LARGEST = 2**53
# json.dumps makes an encoder at each call, which takes longer than its work.
_as_json = json.JSONEncoder(ensure_ascii=False).encode


def canonical_json(value: Any) -> bytes:
    """JSON bytes as RFC 8785 (JCS) has them, which every language can make.

    Raises:
        ValueError: a number is NaN, infinite, or whole and above 2^53; text is not valid Unicode.
        TypeError: a value or key has no JSON form, for instance an integer as key.
    """
    return _text(value).encode()


def content_sha256(artifact: Mapping[str, Any]) -> str:
    """Hash of an artifact's content; 64 hex digits."""
    return hashlib.sha256(canonical_json(content_of(artifact))).hexdigest()


def content_of(artifact: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an artifact that its hash covers, as plain JSON data.

    Left out is what differs between two runs that found the same: content_sha256 itself,
    created_at, search.command, the command of each measurement and cost table, and sidecar.file,
    which is a place and not a content (its sha256 is covered)."""
    content = {
        key: value for key, value in artifact.items() if key not in ("content_sha256", "created_at")
    }
    content["search"] = _without(content.get("search"), "command")
    content["sidecar"] = _without(content.get("sidecar"), "file")
    evidence = content.get("evidence")
    if isinstance(evidence, Mapping) and "measurements" in evidence:
        content["evidence"] = {
            **evidence,
            "measurements": _without_commands(evidence.get("measurements")),
        }
    content["costs"] = _without_commands(content.get("costs"))
    return content


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return _as_json(value)
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            # json would write the key 1 as "1", so that two different values had one form.
            raise TypeError(f"keys must be text, got {wrong[0]!r}")
        # RFC 8785 sorts by UTF-16 code units, in which other planes come before the last of the
        # first one.
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return "{" + ",".join(f"{_text(key)}:{_text(value[key])}" for key in keys) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    raise TypeError(f"has no JSON form: {type(value).__name__}")


def _number(value: int | float) -> str:
    """As ECMAScript writes it: the same shortest digits as Python's repr, laid out otherwise."""
    if isinstance(value, int):
        if abs(value) > _LARGEST:
            raise ValueError("whole numbers must be at most 2^53")
        return str(value)
    if not isfinite(value):
        raise ValueError(f"numbers must be finite, got {value}")
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    # The number is 0.DIGITS times ten to this power.
    point = int(exponent or 0) + (len(whole) if whole != "0" else len(digits) - len(fraction))
    digits = digits.rstrip("0")
    if value < 0:
        sign = "-"
    else:
        sign = ""
    if 0 < point <= 21:
        padded = digits.ljust(point, "0")
        if len(padded) == point:
            return sign + padded
        return f"{sign}{padded[:point]}.{padded[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if digits[1:]:
        rest = f".{digits[1:]}"
    else:
        rest = ""
    return f"{sign}{digits[0]}{rest}e{point - 1:+d}"


def _without(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {k: v for k, v in value.items() if k != key}
    return value


def _without_commands(entries: Any) -> Any:
    if isinstance(entries, list | tuple):
        return [_without(entry, "command") for entry in entries]
    return entries
