"""Rows and score arrays of an artifact, written alike by every search of heads.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
from pydantic import TypeAdapter

from artifacts import Pattern as ArtifactPattern
from artifacts import pattern_name
from kernels.patterns import Pattern

Rows = tuple[tuple[str, ...] | None, ...]
"""Pattern names of each layer, None for a layer without patterns."""
_ARTIFACT_PATTERN: TypeAdapter[ArtifactPattern] = TypeAdapter(ArtifactPattern)


def as_artifact_pattern(pattern: Pattern) -> ArtifactPattern:
    """The artifact's record of a kernel pattern: same kind, same sizes."""
    return _ARTIFACT_PATTERN.validate_python({"kind": pattern.kind, **asdict(pattern)})


def rows_of(layers: Iterable[Sequence[Pattern] | None]) -> tuple[Rows, dict[str, ArtifactPattern]]:
    """An artifact's rows for these patterns, and the patterns by name.

    Args:
        layers: the patterns of each, None for a layer without.
    """
    rows: list[tuple[str, ...] | None] = []
    patterns: dict[str, ArtifactPattern] = {}
    for layer in layers:
        if layer is None:
            rows.append(None)
            continue
        records = [as_artifact_pattern(pattern) for pattern in layer]
        names = tuple(map(pattern_name, records))
        rows.append(names)
        patterns |= dict(zip(names, records, strict=True))
    return tuple(rows), patterns


def winners(rows: Rows, patterns: Mapping[str, ArtifactPattern]) -> dict[str, int]:
    """Number of heads of each kind, most first."""
    return dict(Counter(patterns[name].kind for row in rows for name in row or ()).most_common())


def pick(values: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """(L, H) of (L, H, C): values of the chosen candidates, NaN where `choice` is -1."""
    taken = np.take_along_axis(values, np.maximum(choice, 0)[..., None], axis=-1)[..., 0]
    picked: np.ndarray = np.where(choice < 0, np.nan, taken)
    return picked


def score_arrays(
    choice: np.ndarray,
    names: Sequence[str],
    measures: Mapping[str, np.ndarray],
    sizes: Sequence[Mapping[str, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    """The sidecar's arrays: each head's candidate, and the scores of all, (L, H) each.

    Args:
        choice: (L, H) candidate of each head, -1 in layers without patterns.
        names: of the candidates.
        measures: (L, H, C) by name, NaN in layers without patterns.
        sizes: for each candidate (L, H) by name, where heads differ in them.
    """
    arrays: dict[str, np.ndarray] = {"chosen.candidate": choice.astype(np.int32)}
    for measure, values in measures.items():
        arrays[f"chosen.{measure}"] = pick(values, choice).astype(np.float32)
    for c, name in enumerate(names):
        for measure, values in measures.items():
            arrays[f"candidates.{c}.{name}.{measure}"] = values[..., c].astype(np.float32)
        if sizes is not None:
            for size, values in sizes[c].items():
                arrays[f"candidates.{c}.{name}.{size}"] = values.astype(np.int32)
    return arrays
