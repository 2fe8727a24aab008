"""Hashes of content only, independent of key order, file layout, time and command line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import rfc8785

from artifacts.errors import ArtifactError

# Limit of canonical JSON: content within it can be written in any file layout.
MAX_CONTENT = 4 * 2**20


def canonical_json(value: Any) -> bytes:
    """Serialize to canonical JSON of RFC 8785 (JCS), which every language can write.

    Raises:
        ValueError: a number is NaN, infinite, or whole and 2^53 or more; text is not valid Unicode;
            a value or key has no JSON form, for instance an integer as key.
    """
    return rfc8785.dumps(value)


def content_sha256(artifact: Mapping[str, Any]) -> str:
    """Return the hash of the content of an artifact's fields, 64 hex digits.

    Raises:
        ArtifactError: a field has no JSON form, or the content exceeds the size limit.
    """
    try:
        content = canonical_json(content_of(artifact))
    except ValueError as error:
        raise ArtifactError(f"holds what JSON has no place for: {error}") from None
    if len(content) > MAX_CONTENT:
        raise ArtifactError(
            f"has {len(content)} bytes of content, an artifact may have {MAX_CONTENT}"
        )
    return hashlib.sha256(content).hexdigest()


def content_of(artifact: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an artifact that its hash covers, as plain JSON data.

    Fields that differ between two runs with the same result are excluded: content_sha256 itself,
    created_at, search.command, the command of each measurement, and sidecar.file. sidecar.file is a
    location; the hash covers the sidecar's sha256 instead.
    """
    content = _without(artifact, "content_sha256", "created_at")
    for section, field in (("search", "command"), ("sidecar", "file")):
        if content[section] is not None:
            content[section] = _without(content[section], field)
    evidence = content["evidence"]
    if "measurements" in evidence:
        entries = [_without(entry, "command") for entry in evidence["measurements"]]
        content["evidence"] = {**evidence, "measurements": entries}
    return content


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
