"""Lists of head patterns (head_file), from and to patterns and prefill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from artifacts.analysis.density import mean_density
from artifacts.errors import ArtifactError, shorten
from artifacts.interop.head_file import (
    BLOCKS,
    FEW_COLUMNS,
    LEFT_OUT,
    MORE_COLUMNS,
    Entry,
    HeadFormat,
    entry,
    fingerprint,
    is_angelslim,
    parse,
)
from artifacts.interop.report import Export, Import, Notes
from artifacts.interop.shape import Given, Shape, model_shape
from artifacts.interop.source import Source, array, header, original
from artifacts.schema.artifact import Artifact, Prefill
from artifacts.schema.patterns import (
    DEFAULT_LAST_Q,
    TILE,
    AnyPattern,
    BlockSparse,
    Dense,
    Effect,
    SkipSoftmax,
    Static,
    VerticalSlash,
    pattern_name,
)

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# vLLM's and SGLang's own, where the model's config.json says nothing.
_THRESHOLD = 32768
# Where MInference has no limit: sparse from where the patterns leave out a fifth.
_WORTH_IT = 0.8
# Fields of AngelSlim's model_fingerprint that are sizes, and their names in ModelInfo.
_FINGERPRINT_SIZES = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_positions",
}


def read(source: Source, given: Given, *, format: HeadFormat) -> Import:
    """Read a file of MInference's or AngelSlim's, or one for vLLM and SGLang.

    Where nobody says from which length on it serves sparsely, that is as the tool does it, or,
    where it has no such limit, from where the patterns leave out a fifth of the causal area.

    Raises:
        ArtifactError: the file is no such list, or does not fit the model.
    """
    import numpy as np

    document = source.json()
    layers = parse(document, format)
    most_heads = max((head + 1 for row in layers for head in row), default=0)
    if not most_heads:
        raise ArtifactError("names no head")
    fields = fingerprint(document)
    shape = model_shape(given, source.path, own=None, **_sizes_shown(layers, most_heads, fields))
    model = shape.model
    if len(layers) > model.num_layers:
        raise ArtifactError(
            f"names layer {len(layers) - 1}, the model has {model.num_layers} layers"
        )
    if most_heads > model.num_heads:
        raise ArtifactError(
            f"names head {most_heads - 1}, the model has {model.num_heads} query heads"
        )
    _check_fingerprint(fields, shape)
    notes = Notes()
    table = _complete(layers, model.num_layers, model.num_heads)
    total = model.num_layers * model.num_heads
    filled_in = total - sum(map(len, layers))
    notes.heads(
        "filled in",
        "the file leaves it out: vertical_and_slash 1000, 6096, as MInference does",
        filled_in,
    )
    read_as = [
        [_pattern(each, format, shape, is_angelslim(document)) for each in row] for row in table
    ]
    for _, changes in chain.from_iterable(read_as):
        for effect, what in changes:
            notes.heads(effect, what)
    patterns = {pattern_name(pattern): pattern for pattern, _ in chain.from_iterable(read_as)}
    names = [tuple(pattern_name(pattern) for pattern, _ in row) for row in read_as]
    rows = shape.leave(names, notes, model.num_heads)
    exact = 0
    for layer, row in enumerate(read_as):
        for head, (_, changes) in enumerate(row):
            listed = layer < len(layers) and head in layers[layer]
            unchanged = all(effect == "same" for effect, _ in changes)
            exact += listed and unchanged and rows[layer] is not None
    scores = _scores_of([each.score for row in table for each in row if each.score is not None])
    if scores == "other":
        notes.file(
            "same", "the scores are no recalls (some are above 1); they are kept in the sidecar"
        )
    used = {name for row in rows for name in row or ()}
    artifact = shape.artifact(
        patterns={name: pattern for name, pattern in patterns.items() if name in used},
        prefill=Prefill(
            dense_below=given.dense_below or 0,
            dense_tail=given.dense_tail or 0,
            layers=rows,
            imported=source.imported(format, scores),
        ),
    )
    if given.dense_below is None:
        length = _dense_below(artifact, format, shape.config, notes)
        artifact = artifact.model_copy(
            update={"prefill": artifact.prefill.model_copy(update={"dense_below": length})}
        )
    table_of_scores = [
        [np.nan if each.score is None else each.score for each in row] for row in table
    ]
    return Import(
        artifact=artifact,
        arrays=source.kept("prefill")
        | {"imported.score": np.array(table_of_scores, dtype=np.float64)},
        report=notes.report(total, exact),
    )


def write(
    artifact: Artifact, arrays: Mapping[str, Array], out: Path, *, format: HeadFormat
) -> Export:
    """The file for `out`, and how true it is.

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
            pattern = None if row is None else artifact.patterns[row[head]]
            read = originals[layer][head] if originals else None
            if read is not None and _still(read, pattern, format):
                exact += 1
                listed[-1][str(head)] = read.as_json
                continue
            recall = 0.0
            if recalls is not None and recalls[layer, head] == recalls[layer, head]:
                recall = float(recalls[layer, head])
            nearest, changes = _nearest(pattern, artifact, arrays, format)
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


def _complete(
    layers: Sequence[dict[int, Entry]], num_layers: int, num_heads: int
) -> list[list[Entry]]:
    filled = [*layers, *[dict[int, Entry]()] * (num_layers - len(layers))]
    return [[row.get(head, LEFT_OUT) for head in range(num_heads)] for row in filled]


def _sizes_shown(
    layers: Sequence[dict[int, Entry]], most_heads: int, fields: Mapping[str, Any]
) -> dict[str, int]:
    """The sizes of the model that the file shows, by their names in ModelInfo."""
    sizes = {"num_layers": len(layers)}
    # Where some layer names every head up to the highest, these are all heads.
    if any(len(row) == most_heads for row in layers):
        sizes["num_heads"] = most_heads
    for field, name in _FINGERPRINT_SIZES.items():
        size = fields.get(field)
        if size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise ArtifactError(
                f"model_fingerprint.{field}: must be a whole number, got {shorten(size)}"
            )
        sizes[name] = size
    return sizes


def _check_fingerprint(fields: Mapping[str, Any], shape: Shape) -> None:
    """Raise ArtifactError where the file was searched for another model."""
    of_config = {**shape.config, "num_hidden_layers": shape.model.num_layers}
    for field, value in fields.items():
        of_model = of_config.get(field)
        if of_model is not None and of_model != value:
            both = f"is {shorten(value)}, the model has {shorten(of_model)}"
            raise ArtifactError(f"model_fingerprint.{field} {both}: which one is it?")


def _pattern(
    read: Entry, format: HeadFormat, shape: Shape, angelslim: bool
) -> tuple[AnyPattern, list[tuple[Effect, str]]]:
    """The pattern of an entry, and what is not the same."""
    pattern = read.pattern(format)
    changes: list[tuple[Effect, str]] = []
    if angelslim and read.name == "block_sparse":
        changes.append(
            (
                "chooses otherwise",
                "AngelSlim runs block_sparse as vertical_and_slash of the same sizes",
            )
        )
    if read.shares is not None and read.shares[0] != read.shares[1]:
        changes.append(
            ("computes more", "columns and diagonals share one coverage here: the larger")
        )
    if (
        read.name == "vertical_and_slash"
        and read.sizes[0] == FEW_COLUMNS
        and format == "sparse_attention_config"
    ):
        changes.append(
            (
                "same",
                f"{FEW_COLUMNS} columns are read as {MORE_COLUMNS} by vLLM and SGLang, and so here",
            )
        )
    if isinstance(pattern, VerticalSlash):
        last_q = _chunked(shape.config, "sparse_attention_last_q", 1024)
        if format == "sparse_attention_config" and last_q:
            pattern = pattern.model_copy(update={"last_q": last_q})
        if pattern.vertical < TILE or pattern.slash < TILE:
            always = (
                f"the first {TILE} columns and the nearest {TILE} diagonals are always kept here"
            )
            changes.append(("computes more", always))
    return pattern, changes


def _dense_below(
    artifact: Artifact, format: HeadFormat, config: Mapping[str, Any], notes: Notes
) -> int:
    if format == "sparse_attention_config":
        return 1 + (_chunked(config, "sparse_attention_threshold", 2**31) or _THRESHOLD)
    length = 1024
    while (
        length < artifact.model.max_positions and (mean_density(artifact, length) or 0) > _WORTH_IT
    ):
        length *= 2
    notes.file(
        "same",
        f"dense below {length:,} tokens, where the patterns leave out little; MInference has no "
        f"limit",
    )
    return length


def _chunked(config: Mapping[str, Any], name: str, most: int) -> int | None:
    """A number that the model's config.json has for vLLM and SGLang; None where it has none."""
    section = config.get("dual_chunk_attention_config")
    value = section.get(name) if isinstance(section, dict) else None
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
        return value
    return None


def _scores_of(scores: Sequence[float]) -> Literal["recall", "other"] | None:
    """Kind of scores: recalls, others where some exceed 1, None where all are 0 or 1."""
    # All 0, or the 1 that AngelSlim writes.
    if set(scores) <= {0, 1}:
        return None
    # float32 means of shares end up a rounding error above 1.
    if all(0 <= score <= 1.0001 for score in scores):
        return "recall"
    return "other"


def _originals(artifact: Artifact, arrays: Mapping[str, Array]) -> list[list[Entry]] | None:
    """The entries that were imported; None where there are none."""
    imported = artifact.prefill.imported
    model = artifact.model
    source = original("prefill", imported, arrays, "minference", "sparse_attention_config")
    if source is None or imported is None:
        return None
    layers = parse(source.json(), "minference")
    if len(layers) <= model.num_layers:
        return _complete(layers, model.num_layers, model.num_heads)
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
    pattern: AnyPattern | None, artifact: Artifact, arrays: Mapping[str, Array], format: HeadFormat
) -> tuple[Entry, list[tuple[Effect, str]]]:
    """Entry nearest to a pattern (None: the layer slides), and the differences that remain."""
    nearest, changes = _for_minference(pattern, artifact, arrays)
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
    pattern: AnyPattern | None, artifact: Artifact, arrays: Mapping[str, Array]
) -> tuple[Entry, list[tuple[Effect, str]]]:
    changes: list[tuple[Effect, str]] = []
    most = artifact.model.max_positions
    match pattern:
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
                effect: Effect = "computes more" if blocks <= BLOCKS else "keeps less"
                changes = [(effect, f"always {BLOCKS} blocks, {limit}")]
            return entry("block_sparse", blocks, 1), changes
        case Static():
            columns, diagonals = (header(arrays).get(name) for name in pattern.arrays)
            a = FEW_COLUMNS + 1 if columns is None else max(columns.size, 1)
            b = most if diagonals is None else max(TILE * diagonals.size, 1)
            what = "static columns and diagonals are written by their number: each prompt chooses"
            return entry("vertical_and_slash", a, b), [("chooses otherwise", what)]
        case None:
            changes = [
                ("not carried over", "a layer that slides over its own window is written as dense")
            ]
        case SkipSoftmax():
            changes = [("computes more", "skip-softmax is written as dense: nothing is skipped")]
        case Dense():
            changes = [("same", f"dense is written as {most:,} diagonals")]
        case _ if pattern.streamed is not None:
            sizes = dict(pattern)
            return entry("stream_llm", sizes["sink"], sizes["window"]), list(pattern.streamed)
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
