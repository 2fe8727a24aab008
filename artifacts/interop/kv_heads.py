"""Policies of KV heads by score, as DuoAttention's table has them.

A streaming head keeps sinks and a window at their positions in the text. An export writes the
imported scores if a threshold separates them as the artifact's policies do. Otherwise it writes 1
and 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError
from artifacts.interop.report import Import, Notes
from artifacts.interop.shape import ImportOptions, model_shape
from artifacts.interop.source import Source, array
from artifacts.schema.artifact import Artifact
from artifacts.schema.kv_cache import AnyPolicy, Full, KVCache, Policy, Streaming
from artifacts.schema.patterns import Effect

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

Table = list[list[float]]
SCORES = "imported.full_attention"
# DuoAttention's default sizes.
SINKS = 128
WINDOW = 256
# Between the 1 of a full head and the 0 of a streaming head.
THRESHOLD = 0.5
UNIT = "KV head"
SLIDES = "a layer that slides over its own window is full"


def streaming(options: ImportOptions, *, sinks: int, window: int) -> Streaming:
    """Make the policy of streaming heads; the user's sizes replace the default ones."""
    if options.sinks is not None:
        sinks = options.sinks
    if options.window is not None:
        window = options.window
    return Streaming(
        sinks=sinks,
        window=window,
        positions="original",
    )


def import_heads(
    source: Source,
    options: ImportOptions,
    *,
    table: Table,
    keep: Sequence[Sequence[bool]],
    stream: Streaming,
    differs: tuple[Effect, str],
    drawn: Collection[tuple[int, int]] = (),
    notes: Notes,
) -> Import:
    """Make an artifact with only a kv_cache section.

    Args:
        source: imported file.
        options: model options of the user.
        table: scores of shape (layers, KV heads).
        keep: True for heads that keep everything, in the shape of the table.
        stream: policy of the other heads.
        differs: note for each streaming head, which streams differently in the other tool.
        drawn: layer and head of heads whose policy is random in the other tool.
        notes: notes of the report; notes on heads are added.

    Raises:
        ArtifactError: the table does not fit the model, or all layers use a sliding window.
    """
    import numpy as np

    num_layers = len(table)
    num_kv_heads = len(table[0])
    shape = model_shape(options, source.path, num_layers=num_layers, num_kv_heads=num_kv_heads)
    if shape.model.num_layers != num_layers:
        raise ArtifactError(f"has {num_layers} layers, the model has {shape.model.num_layers}")
    stream_name = f"stream_{stream.sinks}_{stream.window}"
    names = [tuple("full" if kept else stream_name for kept in row) for row in keep]
    rows = shape.leave(names, notes, num_kv_heads)
    counts = Counter(name for row in rows for name in row or ())
    if not counts:
        raise ArtifactError("every layer of the model slides: nothing is left to choose")
    effect, what = differs
    notes.heads(effect, what, counts[stream_name])
    notes.file("same", f"{counts[stream_name]} of {counts.total()} KV heads stream")
    policies: dict[str, Policy] = {"full": Full(), stream_name: stream}
    section = KVCache(
        policies={name: policy for name, policy in policies.items() if counts[name]},
        layers=rows,
        imported=source.imported("duo_attention"),
    )
    by_chance = sum(keep[layer][head] and rows[layer] is not None for layer, head in drawn)
    return Import(
        artifact=shape.artifact(kv_cache=section),
        arrays={SCORES: np.array(table, dtype=np.float64)},
        report=notes.report(num_layers * num_kv_heads, counts["full"] - by_chance, UNIT),
    )


def head_policies(artifact: Artifact) -> list[list[AnyPolicy | None]]:
    """Return the policy of every KV head by layer; None in a sliding-window layer.

    Raises:
        ArtifactError: the artifact has no kv_cache section.
    """
    section = artifact.kv_cache
    if section is None:
        raise ArtifactError(
            "the artifact has no kv_cache section, which is what this format is about"
        )
    num_kv_heads = artifact.model.num_kv_heads
    policies: list[list[AnyPolicy | None]] = []
    for layer in range(artifact.model.num_layers):
        names = section.heads(layer, num_kv_heads)
        if names is None:
            policies.append([None] * num_kv_heads)
        else:
            policies.append([section.policies[name] for name in names])
    return policies


def parted_scores(
    policies: Sequence[Sequence[AnyPolicy | None]], arrays: Mapping[str, Array]
) -> tuple[Table, float]:
    """Return the scores to write, and the threshold that only streaming heads do not reach."""
    keep = [[not isinstance(policy, Streaming) for policy in row] for row in policies]
    imported = array(arrays, SCORES, (len(keep), len(keep[0])))
    if imported is not None:
        table: Table = imported.tolist()
        pairs = [
            (value, kept)
            for values, row in zip(table, keep, strict=True)
            for value, kept in zip(values, row, strict=True)
        ]
        least_kept = min((value for value, kept in pairs if kept), default=math.inf)
        if all(value < least_kept for value, kept in pairs if not kept):
            return table, least_kept if math.isfinite(least_kept) else 2.0
    return [[float(kept) for kept in row] for row in keep], THRESHOLD
