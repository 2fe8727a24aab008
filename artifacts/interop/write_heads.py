"""Writes patterns of prefill as lists of head patterns (head_file)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.interop.head_file import (
    BLOCKS,
    FEW_COLUMNS,
    LEFT_OUT,
    MORE_COLUMNS,
    Entry,
    HeadFormat,
    complete,
    entry,
    parse,
)
from artifacts.interop.report import Export, Notes
from artifacts.interop.source import array, original
from artifacts.schema.artifact import Artifact
from artifacts.schema.patterns import (
    DEFAULT_LAST_Q,
    AnyPattern,
    AShape,
    BlockSparse,
    Dense,
    Effect,
    VerticalSlash,
)

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array


def write(
    artifact: Artifact, arrays: Mapping[str, Array], out: Path, *, format: HeadFormat
) -> Export:
    """Write the list of head patterns, each head with a score.

    A head that was imported and not changed since is written as it was read, with its score;
    another with its recall, where the sidecar has it. What the format lacks is written as the
    nearest that it has."""
    notes = Notes()
    shape = (artifact.model.num_layers, artifact.model.num_heads)
    originals = _originals(artifact, arrays)
    recalls = array(arrays, "chosen.recall", shape)
    listed: list[dict[str, list[Any]]] = []
    exact = 0
    for layer, row in enumerate(artifact.prefill.layers):
        listed.append({})
        for head in range(shape[1]):
            if row is None:
                pattern = None
            else:
                pattern = artifact.patterns[row[head]]
            if originals:
                read = originals[layer][head]
            else:
                read = None
            if read is not None and _still(read, pattern, format):
                exact += 1
                listed[-1][str(head)] = read.as_json
                continue
            recall = 0.0
            if recalls is not None and recalls[layer, head] == recalls[layer, head]:
                recall = float(recalls[layer, head])
            nearest, changes = _nearest(pattern, artifact, format)
            listed[-1][str(head)] = [*nearest.as_json[:3], recall]
            exact += not changes
            for effect, what in changes:
                notes.heads(effect, what)
    _settings(artifact, format, notes)
    notes.left_out(artifact, "prefill")
    return Export(
        files={out: json.dumps(listed).encode() + b"\n"},
        report=notes.report(shape[0] * shape[1], exact),
    )


def _originals(artifact: Artifact, arrays: Mapping[str, Array]) -> list[list[Entry]] | None:
    """The entries that were imported; None where there are none."""
    imported = artifact.prefill.imported
    model = artifact.model
    source = original("prefill", imported, arrays, "minference", "sparse_attention_config")
    if source is None or imported is None:
        return None
    layers = parse(source.json(), "minference")
    if len(layers) <= model.num_layers:
        return complete(layers, model.num_layers, model.num_heads)
    return None


def _still(read: Entry, pattern: AnyPattern | None, format: HeadFormat) -> bool:
    """True where the tool makes the artifact's pattern of an entry."""
    if format != "minference" and read.name != "vertical_and_slash":
        return False
    if pattern is None:
        return True
    meant = read.pattern(format)
    if (
        isinstance(pattern, VerticalSlash)
        and isinstance(meant, VerticalSlash)
        and format != "minference"
    ):
        # Their last_q stands in the model's config.json.
        meant = meant.model_copy(update={"last_q": pattern.last_q})
    return meant == pattern


def _nearest(
    pattern: AnyPattern | None, artifact: Artifact, format: HeadFormat
) -> tuple[Entry, list[tuple[Effect, str]]]:
    """Entry nearest to a pattern (None: the layer slides), and the differences that remain."""
    nearest, changes = _for_minference(pattern, artifact)
    if format == "minference":
        return nearest, changes
    a, b = nearest.sizes
    if nearest.name == "stream_llm":
        changes.append(
            ("chooses otherwise", "an A-shape is written as vertical_and_slash of the same sizes")
        )
    if nearest.name == "block_sparse":
        a, b = LEFT_OUT.sizes
        changes = [
            (
                "chooses otherwise",
                f"block_sparse is written as vertical_and_slash {a}, {b}, as MInference does",
            )
        ]
    if a == FEW_COLUMNS:
        changes.append(("computes more", f"{FEW_COLUMNS} columns are read as {MORE_COLUMNS}"))
    return entry("vertical_and_slash", a, b), changes


def _for_minference(
    pattern: AnyPattern | None, artifact: Artifact
) -> tuple[Entry, list[tuple[Effect, str]]]:
    changes: list[tuple[Effect, str]] = []
    most = artifact.model.max_positions
    match pattern:
        case AShape(sink=sink, window=window):
            return entry("stream_llm", sink, window), []
        case VerticalSlash(vertical=vertical, slash=slash, last_q=last_q, coverage=coverage):
            if last_q != DEFAULT_LAST_Q:
                changes.append(
                    (
                        "chooses otherwise",
                        f"the last {DEFAULT_LAST_Q} queries choose, here {last_q}",
                    )
                )
            if coverage is not None:
                changes.append(
                    ("computes more", "a coverage is left out: always all that the sizes allow")
                )
            return entry("vertical_and_slash", vertical, slash), changes
        case BlockSparse(blocks=blocks, coverage=coverage):
            if blocks != BLOCKS or coverage is not None:
                limit = f"here {blocks}"
                if coverage is not None:
                    limit += f" at most, by coverage {coverage}"
                if blocks <= BLOCKS:
                    effect: Effect = "computes more"
                else:
                    effect = "keeps less"
                changes = [(effect, f"always {BLOCKS} blocks, {limit}")]
            return entry("block_sparse", blocks, 1), changes
        case None:
            changes = [
                ("not carried over", "a layer that slides over its own window is written as dense")
            ]
        case Dense():
            changes = [("same", f"dense is written as {most:,} diagonals")]
        case _:
            changes = [("computes more", f"{pattern.kind} is written as dense")]
    return entry("vertical_and_slash", FEW_COLUMNS + 1, most), changes


def _settings(artifact: Artifact, format: HeadFormat, notes: Notes) -> None:
    """Settings of prefill beside the heads' patterns."""
    prefill = artifact.prefill
    if prefill.dense_tail:
        notes.file("keeps less", f"the last {prefill.dense_tail} queries do not see every key")
    if format == "sparse_attention_config":
        threshold = f'"sparse_attention_threshold": {max(prefill.dense_below - 1, 0)}'
        notes.file(
            "same", f"set {threshold} under dual_chunk_attention_config in the model's config.json"
        )
        last = {p.last_q for p in artifact.patterns.values() if isinstance(p, VerticalSlash)}
        if last - {DEFAULT_LAST_Q}:
            notes.file(
                "same", f'set "sparse_attention_last_q" there: one of {sorted(last)} for all heads'
            )
    elif prefill.dense_below and prefill.imported is None:
        notes.file(
            "keeps less", f"prompts below {prefill.dense_below} tokens are served sparsely, too"
        )
    if prefill.growth is not None:
        at = prefill.growth.length
        notes.file(
            "not carried over", f"sizes go with the length here; written are those of {at} tokens"
        )
    if prefill.front is not None:
        notes.file(
            "not carried over",
            f"written is prefill.layers, of a front of {len(prefill.front.points)} points",
        )
