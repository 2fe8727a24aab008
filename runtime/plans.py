"""From an artifact's rows to the plans of layers, each for the heads that a process has."""

from __future__ import annotations

from collections.abc import Mapping

from artifacts import Artifact
from kernels.patterns import LayerPlan, Pattern
from runtime.patterns import kernel_growth


def layer_plan(
    artifact: Artifact, patterns: Mapping[str, Pattern], layer: int, heads: slice, num_kv_heads: int
) -> LayerPlan | None:
    """The plan of a layer's query heads `heads`, which read `num_kv_heads` KV heads; None for a layer left alone.

    patterns: the artifact's by name, from runtime.patterns.kernel_patterns.
    """
    row = artifact.prefill.layers[layer]
    if row is None:
        return None
    return LayerPlan(
        [patterns[name] for name in row[heads]],
        num_kv_heads,
        dense_tail=artifact.prefill.dense_tail,
        growth=kernel_growth(artifact),
    )
