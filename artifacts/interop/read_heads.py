"""Read lists of head patterns (head_file) into patterns and prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from artifacts.analysis.density import mean_density
from artifacts.errors import ArtifactError, shorten
from artifacts.interop.head_file import (
    Entry,
    complete,
    fingerprint,
    is_angelslim,
    parse,
)
from artifacts.interop.report import Import, Notes
from artifacts.interop.shape import ImportOptions, Shape, model_shape
from artifacts.interop.source import Source
from artifacts.schema.artifact import Artifact, Prefill
from artifacts.schema.patterns import (
    TILE,
    AnyPattern,
    Effect,
    VerticalSlash,
    pattern_name,
)

# MInference has no dense_below. Prefill is sparse once the patterns skip a fifth.
_WORTH_IT = 0.8
# Size fields of AngelSlim's model_fingerprint, and their names in ModelInfo.
_FINGERPRINT_SIZES = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_positions",
}


def read(source: Source, options: ImportOptions) -> Import:
    """Read a file of MInference or AngelSlim.

    These tools have no dense_below. Unless the user sets it, it is the length at which the patterns
    skip a fifth of the causal area.

    Raises:
        ArtifactError: the file is not such a list, or does not fit the model.
    """
    import numpy as np

    document = source.json()
    layers = parse(document)
    most_heads = max((head + 1 for row in layers for head in row), default=0)
    if not most_heads:
        raise ArtifactError("names no head")
    fields = fingerprint(document)
    shape = model_shape(options, source.path, own=None, **_sizes_shown(layers, most_heads, fields))
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
    table = complete(layers, model.num_layers, model.num_heads)
    total = model.num_layers * model.num_heads
    filled_in = total - sum(map(len, layers))
    notes.heads(
        "filled in",
        "the file leaves it out: vertical_and_slash 1000, 6096, as MInference does",
        filled_in,
    )
    angelslim = is_angelslim(document)
    read_as = [[_pattern(each, angelslim) for each in row] for row in table]
    for _, changes in chain.from_iterable(read_as):
        for effect, what in changes:
            notes.heads(effect, what)
    patterns = {pattern_name(pattern): pattern for pattern, _ in chain.from_iterable(read_as)}
    names = [tuple(pattern_name(pattern) for pattern, _ in row) for row in read_as]
    rows = shape.leave(names, notes, model.num_heads)
    exact = 0
    # Layers after the last one in the file are filled in, and none of their heads is exact.
    for listed, read_row, row in zip(layers, read_as, rows, strict=False):
        for head, (_, changes) in enumerate(read_row):
            unchanged = all(effect == "same" for effect, _ in changes)
            exact += head in listed and unchanged and row is not None
    scores = _scores_of([each.score for row in table for each in row if each.score is not None])
    if scores == "other":
        notes.file(
            "same", "the scores are no recalls (some are above 1); they are kept in the sidecar"
        )
    used = {name for row in rows for name in row or ()}
    artifact = shape.artifact(
        patterns={name: pattern for name, pattern in patterns.items() if name in used},
        prefill=Prefill(
            dense_below=options.dense_below or 0,
            dense_tail=options.dense_tail or 0,
            layers=rows,
            imported=source.imported("minference", scores),
        ),
    )
    if options.dense_below is None:
        length = _dense_below(artifact, notes)
        artifact = artifact.model_copy(
            update={"prefill": artifact.prefill.model_copy(update={"dense_below": length})}
        )
    # No score is NaN.
    by_head = np.array([[each.score for each in row] for row in table], dtype=np.float64)
    arrays = source.kept("prefill") | {"imported.score": by_head}
    return Import(artifact=artifact, arrays=arrays, report=notes.report(total, exact))


def _sizes_shown(
    layers: Sequence[dict[int, Entry]], most_heads: int, fields: Mapping[str, Any]
) -> dict[str, int]:
    """Return the model sizes that the file shows, by their names in ModelInfo."""
    sizes = {"num_layers": len(layers)}
    # If a layer names every head up to the highest, these are all heads.
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
    """Raise ArtifactError if the file was searched for another model."""
    of_config = {**shape.config, "num_hidden_layers": shape.model.num_layers}
    for field, value in fields.items():
        of_model = of_config.get(field)
        if of_model is not None and of_model != value:
            both = f"is {shorten(value)}, the model has {shorten(of_model)}"
            raise ArtifactError(f"model_fingerprint.{field} {both}: which one is it?")


def _pattern(read: Entry, angelslim: bool) -> tuple[AnyPattern, list[tuple[Effect, str]]]:
    """Return the pattern of an entry, and its differences."""
    pattern = read.pattern()
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
    if isinstance(pattern, VerticalSlash) and min(pattern.vertical, pattern.slash) < TILE:
        always = f"the first {TILE} columns and the nearest {TILE} diagonals are always kept here"
        changes.append(("computes more", always))
    return pattern, changes


def _dense_below(artifact: Artifact, notes: Notes) -> int:
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


def _scores_of(scores: Sequence[float]) -> Literal["recall", "other"] | None:
    """Kind of scores: "recall", "other" if some exceed 1, None if all are 0 or 1."""
    # All 0, or the 1 that AngelSlim writes.
    if set(scores) <= {0, 1}:
        return None
    # float32 means of fractions can exceed 1 by a rounding error.
    if all(0 <= score <= 1.0001 for score in scores):
        return "recall"
    return "other"
