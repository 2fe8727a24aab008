"""Hashes that depend on content only: not on key order, file layout, time or command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical_json(value: Any) -> bytes:
    """The one way to write a JSON value: UTF-8, sorted keys, no spaces, floats by their shortest repr.

    Raises:
        ValueError: a float is NaN or infinite.
        TypeError: a value or key has no JSON form, for instance an integer as key.
    """
    _check_keys(value)
    return _encode(value)


def content_sha256(artifact: Mapping[str, Any]) -> str:
    """Hash of an artifact's fields as plain JSON data, whose keys are all text; 64 hex digits.

    Left out is what differs between two runs that found the same: content_sha256 itself, created_at,
    search.command, the command of each entry of evidence and costs, and sidecar.file, which is a place and not a
    content (its sha256 is covered).
    """
    content = {key: value for key, value in artifact.items() if key not in ("content_sha256", "created_at")}
    content["search"] = _without(content.get("search"), "command")
    content["sidecar"] = _without(content.get("sidecar"), "file")
    content["evidence"] = _without_commands(content.get("evidence") or [])
    if "costs" in content:
        # Older versions have none.
        content["costs"] = _without_commands(content["costs"])
    return hashlib.sha256(_encode(content)).hexdigest()


def _encode(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def _without(value: Any, key: str) -> Any:
    return {k: v for k, v in value.items() if k != key} if isinstance(value, Mapping) else value


def _without_commands(entries: Any) -> Any:
    return [_without(entry, "command") for entry in entries] if isinstance(entries, list | tuple) else entries


def _check_keys(value: Any) -> None:
    """json would write the key 1 as "1", so that two different values had one form."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"keys must be text, got {key!r}")
            _check_keys(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_keys(entry)
