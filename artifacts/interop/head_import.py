"""From a list of head patterns to an artifact, its arrays and a report."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from artifacts.density import mean_density
from artifacts.errors import ArtifactError, one_line
from artifacts.fields import Imported
from artifacts.interop.files import bare, read_bytes
from artifacts.interop.head_config import FEW_COLUMNS, LEFT_OUT, MORE_COLUMNS, NAMES, Entry, read, scores_of, to_pattern
from artifacts.interop.report import Conversion, Notes, Report
from artifacts.interop.shape import Given, Shape, model_shape
from artifacts.patterns import TILE, AnyPattern, VerticalSlash, pattern_name
from artifacts.schema import Artifact, Prefill

if TYPE_CHECKING:
    from artifacts.sidecar import Array

HeadFormat = Literal["minference", "sparse_attention_config"]
# vLLM's and SGLang's own, where the model's config.json says nothing.
_THRESHOLD = 32768
# Where MInference has no limit: sparse from where the patterns leave out a fifth.
_WORTH_IT = 0.8


def import_heads(
    path: Path, given: Given, *, format: HeadFormat, dense_below: int | None = None, dense_tail: int | None = None
) -> Conversion:
    """Read a file of MInference's, or one for vLLM and SGLang.

    Args:
        path: the JSON file.
        given: what is known of the model beside the file.
        format: which tool it is for, and so what is made of its entries.
        dense_below: in tokens; None is as the tool does it, and where it has no such limit, the length from which the
            patterns leave out a fifth of the causal area.
        dense_tail: last queries that see every key; neither tool has any.

    Raises:
        ArtifactError: the file is no such list, or does not fit the model.
    """
    data = read_bytes(path)
    layers = read(path, data, format)
    heads = max((head + 1 for row in layers for head in row), default=0)
    if not heads:
        raise ArtifactError(f"{one_line(str(path))}: names no head")
    shown = {"num_heads": heads} if _full(layers, heads) else {}
    shape = model_shape(given, path, own=None, num_layers=len(layers), **shown)
    if heads > shape.model.num_heads:
        raise ArtifactError(
            f"{one_line(str(path))}: names head {heads - 1}, the model has {shape.model.num_heads} query heads"
        )
    notes = Notes()
    table = _complete(layers, shape, notes)
    made = [[_pattern(entry, format, shape, notes) for entry in row] for row in table]
    rows = [
        None if layer in shape.sliding else tuple(pattern_name(pattern) for pattern in row)
        for layer, row in enumerate(made)
    ]
    for row in rows:
        if row is None:
            notes.add("not carried over", "the layer slides over a window of its own and is left alone", len(made[0]))
    used = {name for row in rows for name in row or ()}
    scores = scores_of([entry for row in table for entry in row])
    if scores == "other":
        notes.add("same", "the scores are no recalls (some are above 1); they are kept in the sidecar", 0)
    artifact = shape.artifact(
        patterns={pattern_name(p): p for row in made for p in row if pattern_name(p) in used},
        prefill=Prefill(
            dense_below=dense_below or 0,
            dense_tail=dense_tail or 0,
            layers=tuple(rows),
            imported=Imported(format=format, file=bare(path), sha256=hashlib.sha256(data).hexdigest(), scores=scores),
        ),
    )
    if dense_below is None:
        length = _dense_below(artifact, format, shape.config, notes)
        artifact = artifact.model_copy(update={"prefill": artifact.prefill.model_copy(update={"dense_below": length})})
    named = sum(head in range(shape.model.num_heads) for row in layers for head in row)
    left = sum(row is None for row in rows) * shape.model.num_heads
    report = Report(heads=shape.model.num_layers * shape.model.num_heads, exact=max(named - left, 0), notes=notes.all())
    return Conversion(artifact=artifact, arrays=to_arrays(table), report=report)


def _full(layers: Sequence[dict[int, Entry]], heads: int) -> bool:
    """Whether some layer names every head up to the highest: then the file shows how many there are."""
    return any(len(row) == heads for row in layers)


def _complete(layers: Sequence[dict[int, Entry]], shape: Shape, notes: Notes) -> list[list[Entry]]:
    table = []
    for layer in range(shape.model.num_layers):
        row = layers[layer] if layer < len(layers) else {}
        table.append([row.get(head, LEFT_OUT) for head in range(shape.model.num_heads)])
        if missing := shape.model.num_heads - len(row):
            notes.add("filled in", "the file leaves it out: vertical_and_slash 1000, 6096, as MInference does", missing)
    return table


def _pattern(entry: Entry, format: HeadFormat, shape: Shape, notes: Notes) -> AnyPattern:
    pattern = to_pattern(entry, format)
    if entry.shares is not None and entry.shares[0] != entry.shares[1]:
        notes.add("computes more", "columns and diagonals share one coverage here: the larger")
    if entry.name == "vertical_and_slash" and entry.sizes[0] == FEW_COLUMNS and format == "sparse_attention_config":
        notes.add("same", f"{FEW_COLUMNS} columns are read as {MORE_COLUMNS} by vLLM and SGLang, and so here")
    if isinstance(pattern, VerticalSlash):
        last_q = _count(_chunked(shape.config).get("sparse_attention_last_q"), 1024)
        if format == "sparse_attention_config" and last_q:
            pattern = pattern.model_copy(update={"last_q": last_q})
        if pattern.vertical < TILE or pattern.slash < TILE:
            notes.add(
                "computes more", f"the first {TILE} columns and the nearest {TILE} diagonals are always kept here"
            )
    return pattern


def _dense_below(artifact: Artifact, format: HeadFormat, config: Any, notes: Notes) -> int:
    if format == "sparse_attention_config":
        threshold = _chunked(config).get("sparse_attention_threshold")
        return 1 + (_count(threshold, 2**31) or _THRESHOLD)
    length = 1024
    while length < artifact.model.max_positions and (mean_density(artifact, length) or 0) > _WORTH_IT:
        length *= 2
    notes.add("same", f"dense below {length:,} tokens, where the patterns leave out little; MInference has no limit", 0)
    return length


def _chunked(config: Any) -> dict[str, Any]:
    section = config.get("dual_chunk_attention_config")
    return section if isinstance(section, dict) else {}


def _count(value: Any, most: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most else None


def to_arrays(table: Sequence[Sequence[Entry]]) -> dict[str, Array]:
    """What a pattern cannot hold of the entries, (layers, heads): their names, sizes, shares and scores."""
    import numpy as np

    arrays: dict[str, Array] = {
        "imported.name": np.array([[NAMES.index(entry.name) for entry in row] for row in table], dtype=np.int8),
        "imported.sizes": np.array([[entry.sizes for entry in row] for row in table], dtype=np.int32),
        "imported.score": np.array(
            [[np.nan if entry.score is None else entry.score for entry in row] for row in table], dtype=np.float64
        ),
    }
    if any(entry.shares is not None for row in table for entry in row):
        none = (float("nan"), float("nan"))
        arrays["imported.shares"] = np.array([[entry.shares or none for entry in row] for row in table])
    return arrays
