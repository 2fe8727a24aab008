"""Write patterns of prefill as lists of head patterns (head_file)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.interop.head_file import (
    BLOCKS,
    Entry,
    complete,
    entry,
    parse,
)
from artifacts.interop.report import Export, Notes
from artifacts.interop.source import original
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

# Columns of a dense head, which has every diagonal. vLLM loads such files and reads 30 as 130.
_FEW_COLUMNS = 31


def write(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Write the list of head patterns, each head with a score.

    An imported and unchanged head is written with its original entry and score. Other heads are
    written with their recall, if the sidecar has it. A pattern that the format lacks is written as
    the nearest one that it has.
    """
    notes = Notes()
    shape = (artifact.model.num_layers, artifact.model.num_heads)
    originals = _originals(artifact, arrays)
    recalls = arrays.get("chosen.recall")
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
            # A sliding-window layer is unchanged, regardless of its entries in the file.
            if read is not None and pattern in (None, read.pattern()):
                exact += 1
                listed[-1][str(head)] = read.as_json
                continue
            recall = 0.0
            if recalls is not None and recalls[layer, head] == recalls[layer, head]:
                recall = float(recalls[layer, head])
            nearest, changes = _nearest(pattern, artifact)
            listed[-1][str(head)] = [*nearest.as_json[:3], recall]
            exact += not changes
            for effect, what in changes:
                notes.heads(effect, what)
    _settings(artifact, notes)
    notes.left_out(artifact, "prefill")
    return Export(
        files={out: json.dumps(listed).encode() + b"\n"},
        report=notes.report(shape[0] * shape[1], exact),
    )


def _originals(artifact: Artifact, arrays: Mapping[str, Array]) -> list[list[Entry]] | None:
    """Return the imported entries; None without an import."""
    imported = artifact.prefill.imported
    model = artifact.model
    source = original("prefill", imported, arrays, "minference")
    if source is None or imported is None:
        return None
    layers = parse(source.json())
    if len(layers) <= model.num_layers:
        return complete(layers, model.num_layers, model.num_heads)
    return None


def _nearest(
    pattern: AnyPattern | None, artifact: Artifact
) -> tuple[Entry, list[tuple[Effect, str]]]:
    """Nearest entry to a pattern (None: sliding-window layer), and remaining differences."""
    changes: list[tuple[Effect, str]] = []
    max_positions = artifact.model.max_positions
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
            changes = [("same", f"dense is written as {max_positions:,} diagonals")]
        case _:
            changes = [("computes more", f"{pattern.kind} is written as dense")]
    return entry("vertical_and_slash", _FEW_COLUMNS, max_positions), changes


def _settings(artifact: Artifact, notes: Notes) -> None:
    """Add notes on the settings of prefill other than the patterns of heads."""
    prefill = artifact.prefill
    if prefill.dense_tail:
        notes.file("keeps less", f"the last {prefill.dense_tail} queries do not see every key")
    if prefill.dense_below and prefill.imported is None:
        notes.file(
            "keeps less", f"prompts below {prefill.dense_below} tokens are served sparsely, too"
        )
    if prefill.length is not None:
        notes.file(
            "not carried over",
            f"sizes grow on prompts of more than {prefill.length} tokens; the file's do not",
        )
    if prefill.front is not None:
        notes.file(
            "not carried over",
            f"written is prefill.layers, of a front of {len(prefill.front.points)} points",
        )
