"""DuoAttention's full_attention_heads.tsv: which KV heads keep everything and which stream.

A row for each layer, a column for each KV head, tabs between: the share of full attention that the head learned to
want, clipped to 0 to 1. The heads at or above a threshold are retrieval heads and keep all; the others keep the first
sink_size tokens and the last recent_size at their positions in the text. These sizes stand in the config.json beside
the table, which is not a model's.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, one_line, shorten
from artifacts.fields import Imported
from artifacts.interop.files import MOST, parse_json, parse_text, read_bytes
from artifacts.interop.head_import import Conversion
from artifacts.interop.report import Notes, Report
from artifacts.interop.shape import Given, model_shape
from artifacts.kv_cache import Full, KVCache, Streaming
from artifacts.schema import Artifact, Prefill

if TYPE_CHECKING:
    from artifacts.sidecar import Array

# DuoAttention's own where its config.json is not beside the table.
SINKS, WINDOW, THRESHOLD = 128, 256, 0.5
_SIZES = ("sink_size", "recent_size")


def import_duo(
    path: Path,
    given: Given,
    *,
    sinks: int | None = None,
    window: int | None = None,
    threshold: float | None = None,
    sparsity: float | None = None,
) -> Conversion:
    """Read a table into an artifact that has a kv_cache section and no patterns.

    Args:
        path: the TSV file.
        given: what is known of the model beside the file.
        sinks, window: of the streaming heads, in tokens; None takes those of DuoAttention's config.json beside the
            table, or its defaults, 128 and 256.
        threshold: heads with at least this share keep everything; 0.5 unless `sparsity` is given.
        sparsity: instead, the share of all heads that stream: those with the smallest values.

    Raises:
        ArtifactError: the file is no such table, or does not fit the model.
    """
    data = read_bytes(path)
    table = _read(path, parse_text(path, data))
    shape = model_shape(given, path, num_layers=len(table), num_kv_heads=len(table[0]))
    model = shape.model
    if model.num_layers != len(table):
        raise ArtifactError(f"{one_line(str(path))}: has {len(table)} layers, the model has {model.num_layers}")
    notes = Notes()
    at = _threshold(table, threshold, sparsity, notes)
    beside = _sizes_beside(path)
    stream = Streaming(
        sinks=sinks if sinks is not None else beside.get("sink_size", SINKS),
        window=window if window is not None else beside.get("recent_size", WINDOW),
        positions="original",
    )
    names = {True: "full", False: f"stream_{stream.sinks}_{stream.window}"}
    rows = [
        None if layer in shape.sliding else tuple(names[value >= at] for value in row)
        for layer, row in enumerate(table)
    ]
    if all(row is None for row in rows):
        raise ArtifactError(f"{one_line(str(path))}: every layer of the model slides: nothing is left to choose")
    left = sum(row is None for row in rows)
    if left:
        notes.add(
            "not carried over", "the layer slides over a window of its own and is left alone", left * len(table[0])
        )
    counts = Counter(name for row in rows for name in row or ())
    notes.add(
        "same", f"{counts[names[False]]} of {counts.total()} KV heads stream, {at:.6g} and above keep everything", 0
    )
    policies: dict[str, Full | Streaming] = {"full": Full(), names[False]: stream}
    artifact = Artifact(
        model=model,
        search=None,
        patterns={},
        prefill=Prefill(dense_below=0, layers=(None,) * model.num_layers),
        kv_cache=KVCache(
            policies={name: policy for name, policy in policies.items() if counts[name]},
            layers=tuple(rows),
            imported=Imported(format="duo_attention", file=path.name, sha256=hashlib.sha256(data).hexdigest()),
        ),
    )
    report = Report(heads=len(table) * len(table[0]), exact=counts.total(), notes=notes.all())
    return Conversion(artifact=artifact, arrays=_arrays(table), report=report)


def _read(path: Path, text: str) -> list[list[float]]:
    shown = one_line(str(path))
    table: list[list[float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if len(table) == MOST or line.count("\t") >= MOST:
            raise ArtifactError(f"{shown}: line {number}: more than {MOST} layers or heads make no sense")
        try:
            row = [float(cell) for cell in line.split("\t")]
        except ValueError:
            raise ArtifactError(
                f"{shown}: line {number}: must be numbers with tabs between, got {shorten(line)}"
            ) from None
        if not all(math.isfinite(value) for value in row):
            raise ArtifactError(f"{shown}: line {number}: must be finite numbers, got {shorten(line)}")
        if table and len(row) != len(table[0]):
            raise ArtifactError(f"{shown}: line {number}: has {len(row)} values, the lines before have {len(table[0])}")
        table.append([min(max(value, 0.0), 1.0) for value in row])
    if not table:
        raise ArtifactError(f"{shown}: has no line of values")
    return table


def _threshold(
    table: Sequence[Sequence[float]], threshold: float | None, sparsity: float | None, notes: Notes
) -> float:
    if sparsity is None:
        return THRESHOLD if threshold is None else threshold
    if threshold is not None:
        raise ArtifactError("give --threshold or --sparsity, not both")
    ordered = sorted(value for row in table for value in row)
    streaming = round(sparsity * len(ordered))
    at = math.inf if streaming == len(ordered) else ordered[streaming]
    if streaming and ordered[streaming - 1] == at:
        notes.add(
            "chooses otherwise", f"values of {at:.6g} lie on both sides of the cut: all of them keep everything", 0
        )
    return at


def _sizes_beside(path: Path) -> dict[str, int]:
    """sink_size and recent_size of DuoAttention's config.json beside the table, where there is one."""
    file = path.with_name("config.json")
    if not file.is_file():
        return {}
    config = parse_json(file, read_bytes(file))
    if not is_duo_config(config):
        return {}
    for name, least in zip(_SIZES, (0, 1), strict=True):
        size = config[name]
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ArtifactError(f"{file}: {name}: must be a whole number from {least} on, got {shorten(size)}")
    return {name: config[name] for name in _SIZES}


def is_duo_config(config: Any) -> bool:
    """Whether a config.json is DuoAttention's and not a model's."""
    return isinstance(config, dict) and all(name in config for name in _SIZES)


def _arrays(table: Sequence[Sequence[float]]) -> dict[str, Array]:
    import numpy as np

    return {"imported.full_attention": np.array(table, dtype=np.float64)}
