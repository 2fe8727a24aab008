"""From an artifact's patterns, which are data, to those of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from artifacts import Artifact, Static
from artifacts.arrays import check_static
from kernels.patterns import Growth, Pattern, make

if TYPE_CHECKING:
    from artifacts.sidecar import Array


def kernel_patterns(artifact: Artifact, arrays: Mapping[str, Array] | None = None) -> dict[str, Pattern]:
    """The artifact's patterns by name, ready to be built.

    Args:
        artifact: where they are named.
        arrays: those of its sidecar, which static patterns are read from.

    Raises:
        ArtifactError: an array of a static pattern is missing or is no list of positions.
    """
    check_static(artifact.patterns, arrays)
    made = {}
    for name, pattern in artifact.patterns.items():
        if isinstance(pattern, Static):
            assert arrays is not None
            columns, diagonals = (tuple(arrays[array].tolist()) for array in pattern.arrays)
            made[name] = make("static", columns=columns, diagonals=diagonals)
        else:
            made[name] = make(**pattern.model_dump())
    return made


def kernel_growth(artifact: Artifact) -> Growth | None:
    """How the patterns' sizes go with the number of keys; None where they do not."""
    growth = artifact.prefill.growth
    return None if growth is None else Growth(length=growth.length, powers=growth.powers)
