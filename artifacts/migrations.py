"""Older artifacts to the current schema: pure steps from dict to dict, one a version, chained.

A step never changes once released, knows no pydantic model (those move on), and does not touch the mapping it
is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from artifacts.errors import ArtifactError, shorten
from artifacts.schema import SCHEMA_VERSION

OLDEST = 1
Step = Callable[[dict[str, Any]], dict[str, Any]]


MIGRATIONS: dict[int, Step] = {}
"""MIGRATIONS[n] makes version n + 1 of version n and sets its schema_version."""


def version_of(fields: Mapping[str, Any]) -> int:
    """The schema version of an artifact's fields.

    Raises:
        ArtifactError: no usable schema_version, or one that is newer than SCHEMA_VERSION.
    """
    if "schema_version" not in fields:
        raise ArtifactError(f"schema_version: missing, is this an artifact? this headwise writes {SCHEMA_VERSION}")
    version = fields["schema_version"]
    if type(version) is not int or version < OLDEST:
        raise ArtifactError(
            f"schema_version: must be a whole number from 1 to {SCHEMA_VERSION}, got {shorten(version)}"
        )
    if version > SCHEMA_VERSION:
        raise ArtifactError(
            f"schema_version: {version} is newer than this headwise reads (up to {SCHEMA_VERSION}): {_remedy(fields)}"
        )
    return version


def _remedy(fields: Mapping[str, Any]) -> str:
    """Which headwise reads a newer file: the one that wrote it, where the file says so."""
    search = fields.get("search")
    writer = search.get("tool_version") if isinstance(search, Mapping) else None
    # The text goes into a command that the user may copy.
    if isinstance(writer, str) and re.fullmatch(r"[0-9]+(\.[0-9]+){1,3}", writer) and len(writer) <= 20:
        return f"headwise {writer} wrote it, so upgrade to that one or a newer: pip install 'headwise>={writer}'"
    return "upgrade headwise: pip install --upgrade headwise"


def migrate(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same artifact in the current schema version; a copy, whatever the version.

    Raises:
        ArtifactError: see version_of; or the fields are not those of the version that they name.
    """
    result = dict(fields)
    for version in range(version_of(fields), SCHEMA_VERSION):
        try:
            result = MIGRATIONS[version](result)
        except (AttributeError, KeyError, TypeError) as error:
            # A step takes its version's layout for granted, and a right hash does not say that the layout is right.
            raise ArtifactError(f"is not laid out as schema version {version} is: {shorten(str(error))}") from None
    return result
