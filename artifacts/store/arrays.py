"""Checks of the arrays that sections require, and of the scores of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, shorten
from artifacts.schema.artifact import Artifact
from artifacts.store.windows import SEEN_WINDOWS

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Name prefixes of arrays with a value for every query head.
_PER_HEAD = ("chosen.", "candidates.", "imported.score")
_PER_KV_HEAD = "imported.full_attention"
# Arrays for heads with a pattern; NaN in a layer without patterns.
_SCORES = ("chosen.recall", "chosen.error", "chosen.density")


def check_arrays(artifact: Artifact, arrays: Mapping[str, Array]) -> None:
    """Check the required arrays of every section, and the arrays of heads.

    Raises:
        ArtifactError: an array is missing or invalid; the message is about the first one.
    """
    if fault := _windows_fault(artifact, arrays):
        raise ArtifactError(f"search.calibration.seen_windows: {fault}")
    if fault := _heads_fault(artifact, arrays) or _scores_fault(artifact, arrays):
        raise ArtifactError(fault)


def _heads_fault(artifact: Artifact, arrays: Mapping[str, Array]) -> str | None:
    """Reason why an array of heads does not fit the model, or None."""
    model = artifact.model
    for name, array in sorted(arrays.items()):
        if name == _PER_KV_HEAD:
            heads = model.num_kv_heads
        elif name.startswith(_PER_HEAD):
            heads = model.num_heads
        else:
            continue
        shape = array.shape
        if shape[:2] != (model.num_layers, heads) or (name in _SCORES and len(shape) > 2):
            return (
                f"{shorten(name)} has the shape {shorten(shape)}, the model has "
                f"{model.num_layers} layers of {heads} heads: the sidecar is of another model"
            )
    return None


def _scores_fault(artifact: Artifact, arrays: Mapping[str, Array]) -> str | None:
    """Reason why scores do not match the heads with patterns, or None."""
    for name in _SCORES:
        if name not in arrays:
            continue
        table = arrays[name]
        # Only NaN differs from itself.
        scored = (table == table).any(axis=1).tolist()
        rows = zip(scored, artifact.prefill.layers, strict=False)
        for layer, (has_scores, row) in enumerate(rows):
            if has_scores != (row is not None):
                return (
                    f"{name} has scores without patterns or patterns without scores in layer "
                    f"{layer}: YAML and sidecar are of two searches"
                )
    return None


def _windows_fault(artifact: Artifact, arrays: Mapping[str, Array]) -> str | None:
    if artifact.search is None:
        count = 0
    else:
        count = artifact.search.calibration.seen_windows
    table = arrays.get(SEEN_WINDOWS)
    if table is None:
        if count:
            return f"says {count}, and the sidecar has no array {SEEN_WINDOWS}"
        return None
    if table.dtype != "uint8" or table.shape != (count, 32):
        return (
            f"{SEEN_WINDOWS} must be uint8 of shape {(count, 32)}, got "
            f"{table.dtype} of shape {table.shape}"
        )
    return None
