"""What every search writes alike: patterns as an artifact has them, and the version of headwise."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from pydantic import TypeAdapter

from artifacts import Pattern as ArtifactPattern
from kernels.patterns import Pattern

_ARTIFACT_PATTERN: TypeAdapter[ArtifactPattern] = TypeAdapter(ArtifactPattern)


def as_artifact_pattern(pattern: Pattern) -> ArtifactPattern:
    """The artifact's record of a kernel pattern: same kind, same sizes."""
    return _ARTIFACT_PATTERN.validate_python({"kind": pattern.kind, **asdict(pattern)})


def tool_version() -> str:
    """Of the headwise that is installed."""
    try:
        return version("headwise")
    except PackageNotFoundError:
        return "checkout"
