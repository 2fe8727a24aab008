"""What every search of heads writes alike: rows of pattern names, and each candidate's scores as
arrays.

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
"""Each layer's pattern names, None for a layer left alone."""
_ARTIFACT_PATTERN: TypeAdapter[ArtifactPattern] = TypeAdapter(ArtifactPattern)


def as_artifact_pattern(pattern: Pattern) -> ArtifactPattern:
    """The artifact's record of a kernel pattern: same kind, same sizes."""
    return _ARTIFACT_PATTERN.validate_python({"kind": pattern.kind, **asdict(pattern)})


def rows_of(layers: Iterable[Sequence[Pattern] | None]) -> tuple[Rows, dict[str, ArtifactPattern]]:
    """An artifact's rows for these patterns, None for a layer left alone, and the patterns that
    they name."""
    rows: list[tuple[str, ...] | None] = []
    patterns: dict[str, ArtifactPattern] = {}
    for layer in layers:
        named = None if layer is None else [as_artifact_pattern(pattern) for pattern in layer]
        rows.append(None if named is None else tuple(map(pattern_name, named)))
        patterns |= {pattern_name(pattern): pattern for pattern in named or ()}
    return tuple(rows), patterns


def winners(rows: Rows, patterns: Mapping[str, ArtifactPattern]) -> dict[str, int]:
    """How many heads have each kind, most first."""
    return dict(Counter(patterns[name].kind for row in rows for name in row or ()).most_common())


def picked(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """(L, H) of (L, H, C): each head's with the candidate that it got, NaN where that is -1."""
    taken = np.take_along_axis(values, np.maximum(chosen, 0)[..., None], axis=-1)[..., 0]
    found: np.ndarray = np.where(chosen < 0, np.nan, taken)
    return found


def score_arrays(
    chosen: np.ndarray,
    names: Sequence[str],
    measures: Mapping[str, np.ndarray],
    sizes: Sequence[Mapping[str, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    """The sidecar's arrays of what each head got and of every candidate's scores, (L, H) each.

    Args:
        chosen: (L, H) candidate of each head, -1 in layers left alone.
        names: of the candidates.
        measures: (L, H, C) by name, NaN in layers left alone.
        sizes: for each candidate (L, H) by name, where heads differ in them.
    """
    arrays: dict[str, np.ndarray] = {"chosen.candidate": chosen.astype(np.int32)}
    for measure, values in measures.items():
        arrays[f"chosen.{measure}"] = picked(values, chosen).astype(np.float32)
    for c, name in enumerate(names):
        own: dict[str, np.ndarray] = {
            measure: values[..., c].astype(np.float32) for measure, values in measures.items()
        }
        own |= {
            size: values.astype(np.int32) for size, values in (sizes[c] if sizes else {}).items()
        }
        arrays |= {f"candidates.{c}.{name}.{of}": values for of, values in own.items()}
    return arrays
