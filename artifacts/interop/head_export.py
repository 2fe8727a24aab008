"""From an artifact to a list of head patterns as MInference, or vLLM and SGLang, read it, with a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.interop.head_config import BLOCKS, FEW_COLUMNS, LEFT_OUT, MORE_COLUMNS, NAMES, Entry, to_pattern
from artifacts.interop.head_import import HeadFormat
from artifacts.interop.report import Effect, Notes, Report
from artifacts.patterns import (
    DEFAULT_LAST_Q,
    AnyPattern,
    AShape,
    BlockSparse,
    Dense,
    Dilated,
    MemoryUnits,
    Static,
    Strided,
    TriShape,
    VerticalSlash,
)
from artifacts.schema import Artifact

if TYPE_CHECKING:
    from artifacts.sidecar import Array

Changes = list[tuple[Effect, str]]


def export_heads(
    artifact: Artifact, arrays: Mapping[str, Array], out: Path, *, format: HeadFormat
) -> tuple[list[tuple[Path, bytes]], Report]:
    """The file for `out`, and how true it is.

    A head that was imported and not changed since is written as it was read, with its score; another with its recall,
    where the sidecar has it. What the format lacks is written as the nearest that it has.
    """
    notes = Notes()
    originals = _originals(artifact, arrays)
    entries: list[list[Entry]] = []
    exact = 0
    for layer, row in enumerate(artifact.prefill.layers):
        entries.append([])
        for head in range(artifact.model.num_heads):
            original = None if originals is None else originals[layer][head]
            pattern = None if row is None else artifact.patterns[row[head]]
            if original is not None and _still(original, pattern, format):
                entry, changes = original, list[tuple[Effect, str]]()
            else:
                entry, changes = express(pattern, artifact, arrays, format)
                entry = replace(entry, score=_recall(arrays, layer, head))
            exact += not changes
            for effect, what in changes:
                notes.add(effect, what)
            entries[-1].append(entry)
    _sections(artifact, format, notes)
    report = Report(heads=artifact.model.num_layers * artifact.model.num_heads, exact=exact, notes=notes.all())
    scores = [entry.score for row in entries for entry in row if entry.score is not None]
    whole = any(scores) and all(score == int(score) for score in scores)
    listed = [{str(head): entry.as_json(whole=whole) for head, entry in enumerate(row)} for row in entries]
    return [(out, json.dumps(listed).encode() + b"\n")], report


def express(
    pattern: AnyPattern | None, artifact: Artifact, arrays: Mapping[str, Array], format: HeadFormat
) -> tuple[Entry, Changes]:
    """The entry nearest to a pattern, None for a layer that slides; and what is not the same, nothing where all is."""
    if format == "minference":
        return _for_minference(pattern, artifact, arrays)
    entry, changes = _for_minference(pattern, artifact, arrays)
    a, b = entry.sizes
    if entry.name == "stream_llm":
        changes.append(("chooses otherwise", "an A-shape is written as vertical_and_slash of the same sizes"))
    if entry.name == "block_sparse":
        a, b = LEFT_OUT.sizes
        changes = [("chooses otherwise", f"block_sparse is written as vertical_and_slash {a}, {b}, as MInference does")]
    if a == FEW_COLUMNS:
        changes.append(("computes more", f"{FEW_COLUMNS} columns are read as {MORE_COLUMNS}"))
    return Entry(name="vertical_and_slash", sizes=(a, b)), changes


def _for_minference(
    pattern: AnyPattern | None, artifact: Artifact, arrays: Mapping[str, Array]
) -> tuple[Entry, Changes]:
    everything = Entry(name="vertical_and_slash", sizes=(FEW_COLUMNS + 1, artifact.model.max_positions))
    match pattern:
        case None:
            return everything, [("not carried over", "a layer that slides over its own window is written as dense")]
        case Dense():
            return everything, [("same", f"dense is written as {artifact.model.max_positions:,} diagonals")]
        case VerticalSlash(vertical=vertical, slash=slash, last_q=last_q, coverage=coverage):
            changes: Changes = []
            if last_q != DEFAULT_LAST_Q:
                changes.append(("chooses otherwise", f"the last {DEFAULT_LAST_Q} queries choose, here {last_q}"))
            if coverage is not None:
                changes.append(("computes more", "a coverage is left out: always all that the sizes allow"))
            return Entry(name="vertical_and_slash", sizes=(vertical, slash)), changes
        case BlockSparse(blocks=blocks, coverage=coverage):
            if blocks == BLOCKS and coverage is None:
                return Entry(name="block_sparse", sizes=(blocks, 1)), []
            effect: Effect = "computes more" if blocks <= BLOCKS else "keeps less"
            limit = f", here {blocks}{'' if coverage is None else f' at most, by coverage {coverage}'}"
            return Entry(name="block_sparse", sizes=(blocks, 1)), [(effect, f"always {BLOCKS} blocks{limit}")]
        case AShape(sink=sink, window=window):
            return Entry(name="stream_llm", sizes=(sink, window)), []
        case TriShape(sink=sink, window=window):
            return Entry(name="stream_llm", sizes=(sink, window)), [
                ("keeps less", "a tri-shape is written as stream_llm: its last queries see the window alone")
            ]
        case Dilated(sink=sink, window=window):
            return Entry(name="stream_llm", sizes=(sink, window)), [
                ("computes more", "a dilated window is written as stream_llm: the whole window")
            ]
        case Strided(sink=sink, window=window):
            return Entry(name="stream_llm", sizes=(sink, window)), [
                ("keeps less", "a strided pattern is written as stream_llm: nothing beyond its window")
            ]
        case MemoryUnits(sink=sink, window=window):
            return Entry(name="stream_llm", sizes=(sink, window)), [
                ("keeps less", "memory units are written as stream_llm: what they look up is left out")
            ]
        case Static():
            columns, diagonals = (arrays.get(name) for name in pattern.arrays)
            sizes = (
                FEW_COLUMNS + 1 if columns is None else max(columns.size, 1),
                artifact.model.max_positions if diagonals is None else max(64 * diagonals.size, 1),
            )
            return Entry(name="vertical_and_slash", sizes=sizes), [
                ("chooses otherwise", "static columns and diagonals are written by their number: each prompt chooses")
            ]


def _still(original: Entry, pattern: AnyPattern | None, format: HeadFormat) -> bool:
    """Whether the tool makes the pattern of its original entry that the artifact has now."""
    if format != "minference" and original.name != "vertical_and_slash":
        return False
    if pattern is None:
        return True
    meant = to_pattern(original, format)
    if isinstance(pattern, VerticalSlash) and isinstance(meant, VerticalSlash) and format != "minference":
        # Their last_q stands in the model's config.json.
        meant = meant.model_copy(update={"last_q": pattern.last_q})
    return meant == pattern


def _originals(artifact: Artifact, arrays: Mapping[str, Array]) -> list[list[Entry]] | None:
    """The entries that were imported, from the sidecar; None where there are none that fit the model."""
    shape = (artifact.model.num_layers, artifact.model.num_heads)
    names, sizes, scores = (arrays.get(f"imported.{field}") for field in ("name", "sizes", "score"))
    if artifact.prefill.imported is None or names is None or sizes is None or scores is None:
        return None
    if names.shape != shape or sizes.shape != (*shape, 2) or scores.shape != shape:
        return None
    if not ((names >= 0) & (names < len(NAMES))).all() or not (sizes >= 1).all():
        return None
    shares = arrays.get("imported.shares")
    shares = shares if shares is not None and shares.shape == sizes.shape else None

    def entry(layer: int, head: int) -> Entry:
        name = NAMES[names[layer, head]]
        flex = name == "flex_vertical_and_slash" and shares is not None
        pair = shares[layer, head].tolist() if flex and shares is not None else None
        a, b = sizes[layer, head].tolist()
        score = float(scores[layer, head])
        return Entry(
            name=name,
            sizes=(a, b),
            shares=(pair[0], pair[1]) if pair else None,
            score=None if score != score else score,
        )

    return [[entry(layer, head) for head in range(shape[1])] for layer in range(shape[0])]


def _recall(arrays: Mapping[str, Array], layer: int, head: int) -> float:
    recall = arrays.get("chosen.recall")
    if recall is None or recall.ndim != 2 or layer >= recall.shape[0] or head >= recall.shape[1]:
        return 0.0
    value = float(recall[layer, head])
    return value if value == value else 0.0


def _sections(artifact: Artifact, format: HeadFormat, notes: Notes) -> None:
    prefill = artifact.prefill
    if prefill.dense_tail:
        notes.add("keeps less", f"the last {prefill.dense_tail} queries do not see every key", 0)
    if format == "sparse_attention_config":
        notes.add(
            "same",
            f'set "sparse_attention_threshold": {max(prefill.dense_below - 1, 0)} under '
            "dual_chunk_attention_config in the model's config.json",
            0,
        )
        last = {p.last_q for p in artifact.patterns.values() if isinstance(p, VerticalSlash)}
        if last - {DEFAULT_LAST_Q}:
            notes.add("same", f'set "sparse_attention_last_q" there: one of {sorted(last)} for all heads', 0)
    elif prefill.dense_below and prefill.imported is None:
        notes.add("keeps less", f"prompts below {prefill.dense_below} tokens are served sparsely, too", 0)
    if prefill.growth is not None:
        at = prefill.growth.length
        notes.add("not carried over", f"sizes go with the length here; written are those of {at} tokens", 0)
    if prefill.front is not None:
        notes.add("not carried over", f"written is prefill.layers, of a front of {len(prefill.front.points)} points", 0)
    for section in ("decode", "kv_cache"):
        if getattr(artifact, section) is not None:
            notes.add("not carried over", f"the {section} section has no place in this format", 0)
