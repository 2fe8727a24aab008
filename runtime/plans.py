"""From an artifact's patterns, which are data, to the plans of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from artifacts import Artifact, Static
from artifacts.store.arrays import check_static
from kernels.patterns import Growth, LayerPlan, Pattern, make

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array


def kernel_patterns(
    artifact: Artifact, arrays: Mapping[str, Array] | None = None
) -> dict[str, Pattern]:
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


def layer_plans(
    artifact: Artifact, arrays: Mapping[str, Array] | None = None
) -> dict[int, LayerPlan]:
    """The plans of layers by number, each for all of its heads; layers left alone have none. See
    kernel_patterns."""
    patterns = kernel_patterns(artifact, arrays)
    growth = kernel_growth(artifact)
    tail = artifact.prefill.dense_tail
    kv_heads = artifact.model.num_kv_heads
    return {
        layer: LayerPlan([patterns[name] for name in row], kv_heads, dense_tail=tail, growth=growth)
        for layer, row in enumerate(artifact.prefill.layers)
        if row is not None
    }


def part_of(plan: LayerPlan | None, heads: slice, num_kv_heads: int) -> LayerPlan | None:
    """The plan of the query heads that a process has, which read `num_kv_heads` KV heads there."""
    if plan is None:
        return None
    return LayerPlan(
        plan.patterns[heads], num_kv_heads, dense_tail=plan.dense_tail, growth=plan.growth
    )
