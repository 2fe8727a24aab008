"""Scores of KV heads, by which some keep everything and the others stream: DuoAttention's table and KVzip's tensor.

full_attention_heads.tsv of DuoAttention has a row for each layer, a column for each KV head, tabs between: the share of
full attention that the head learned to want, clipped to 0 to 1. The heads at or above a threshold keep all; the others
keep the first sink_size tokens and the last recent_size at their positions in the text. These sizes stand in the
config.json beside the table, which is not a model's. KVzip's .pt is one tensor (layers, KV heads): the largest
attention that a head's keys get while the context is repeated. The heads above a threshold keep all, the others nothing
of the context, but the system prompt before it and all that comes after it.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, naming, shorten
from artifacts.fields import MOST, MOST_HEADS
from artifacts.interop.report import Export, Import, Notes, Report
from artifacts.interop.shape import Given, model_shape
from artifacts.interop.source import MAX_BYTES, Source, array
from artifacts.kv_cache import Full, KVCache, Policy, Streaming
from artifacts.schema import Artifact

if TYPE_CHECKING:
    import torch

    from artifacts.sidecar import Array

Table = list[list[float]]
SCORES = "imported.full_attention"
# DuoAttention's own where its config.json is not beside the table.
SINKS, WINDOW, THRESHOLD = 128, 256, 0.5
# KVzip advises to keep so much.
_KEPT = 0.6
# Tokens of the context for which KVzip's cut is computed.
_CONTEXT = 2**17
_SIZES = {"sink_size": 0, "recent_size": 1}
_UNIT = "KV head"


def read_duo(source: Source, given: Given) -> Import:
    """Read a table into an artifact that has a kv_cache section and no patterns.

    Heads of 0.5 and more keep everything where nobody says otherwise. The sizes of the others are by default those of
    DuoAttention's config.json beside the table, or 128 and 256.

    Raises:
        ArtifactError: the file is no such table, or does not fit the model.
    """
    table, notes = _table(source.text()), Notes()
    ordered = sorted(value for row in table for value in row)
    at = THRESHOLD if given.threshold is None else given.threshold
    if given.sparsity is not None:
        streaming = round(given.sparsity * len(ordered))
        at = math.inf if streaming == len(ordered) else ordered[streaming]
        if streaming and ordered[streaming - 1] == at:
            both = f"values of {at:.6g} lie on both sides of the cut: all of them keep everything"
            notes.file("chooses otherwise", both)
    stream = _stream(given, **_duo_config(source.path.with_name("config.json")) or {})
    notes.file("same", f"KV heads of {at:.6g} and above keep everything")
    return _import(source, given, "duo_attention", table, [[v >= at for v in row] for row in table], stream, notes)


def read_kvzip(source: Source, given: Given) -> Import:
    """Read a tensor of head scores into an artifact that has a kv_cache section and no patterns.

    The share of heads that keep everything is 0.6 where nobody says otherwise, and cut as KVzip cuts it. The others
    keep nothing of a context there, here sinks and a window.

    Raises:
        ArtifactError: the file is no such tensor, or does not fit the model.
    """
    scores = _tensor(source.data)
    if scores.ndim != 2 or not all(1 <= size <= MOST for size in scores.shape) or scores.numel() > MOST_HEADS:
        raise ArtifactError(f"must be of shape (layers, KV heads), got {shorten(tuple(scores.shape))}")
    table: Table = scores.double().tolist()
    values = [value for row in table for value in row]
    if not all(0 <= value <= 1 for value in values):
        raise ArtifactError(f"must hold scores from 0 to 1, got {min(values):g} to {max(values):g}")
    if given.threshold is not None:
        cut = given.threshold
    elif given.sparsity is not None:
        cut = _kvzip_cut(values, 1 - given.sparsity)
    else:
        cut = _kvzip_cut(values, _KEPT)
    keep = [[value > cut for value in row] for row in table]
    stream = _stream(given)
    notes = Notes()
    streamed = f"keeps {stream.sinks} sinks and the last {stream.window} tokens"
    notes.heads(
        "chooses otherwise",
        f"{streamed}; there nothing of the context, and all after it",
        sum(row.count(False) for row in keep),
    )
    notes.file("chooses otherwise", "this file alone was read; KVzip takes each head's largest score of all its files")
    if math.isfinite(cut):
        notes.file("same", f"KV heads above {cut:.6g} keep everything")
    return _import(source, given, "kvzip", table, keep, stream, notes)


def _kvzip_cut(scores: Sequence[float], ratio: float) -> float:
    """Score that a KV head must exceed to keep everything, as KVzip's `_threshold` has it at this ratio.

    KVzip repeats a head's score for every token of the context and cuts that list, so a head counts as many times as
    the context has tokens. With some thousands of them the cut no longer depends on how many.
    """
    if ratio >= 1:
        return -math.inf
    descending = sorted(scores, reverse=True)
    kept_entries = int(len(descending) * _CONTEXT * ratio)
    return descending[max(kept_entries - 1, 0) // _CONTEXT]


def write_duo(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """The table and its config.json beside it.

    Values that were imported are written as they were read, if a threshold still parts the heads; otherwise 1 and 0.

    Raises:
        ArtifactError: the artifact has no kv_cache section, or another config.json lies beside `out`.
    """
    beside = out.with_name("config.json")
    if beside.exists() and _duo_config(beside) is None:
        with naming(beside):
            raise ArtifactError("is there and not DuoAttention's: write the table into a folder of its own")
    table, at, stream, report = _written(artifact, arrays, inclusive=True)
    text = "".join("\t".join(f"{value:.18e}" for value in row) + "\n" for row in table)
    config = {"sink_size": stream.sinks, "recent_size": stream.window, "threshold": at}
    return Export(files={out: text.encode(), beside: json.dumps(config).encode() + b"\n"}, report=report)


def write_kvzip(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """The tensor of scores: those that were imported, if a threshold still parts the heads; otherwise 1 and 0.

    Raises:
        ArtifactError: the artifact has no kv_cache section.
    """
    import torch

    table, _, _, report = _written(artifact, arrays, inclusive=False)
    scores = torch.tensor(table, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(scores.to(dtype).float(), scores):
            break
    stream = io.BytesIO()
    torch.save(scores.to(dtype), stream)
    return Export(files={out: stream.getvalue()}, report=report)


def _tensor(data: bytes) -> torch.Tensor:
    """The floating-point tensor of a .pt file.

    Raises:
        ArtifactError: the file is no .pt of one such tensor, or unpacks to more than is read of any file.
    """
    import torch

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"unpacks to {size} bytes")
        scores = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load names no kinds of errors for files that are none of its own
        raise ArtifactError(f"is no .pt file of one tensor: {shorten(str(error), 120)}") from None
    if type(scores) is not torch.Tensor or scores.layout != torch.strided or not scores.is_floating_point():
        raise ArtifactError("is no .pt file of one tensor of floating-point numbers")
    return scores


def _stream(given: Given, sink_size: int = SINKS, recent_size: int = WINDOW, **others: Any) -> Streaming:
    sinks, window = given.sinks, given.window
    return Streaming(
        sinks=sink_size if sinks is None else sinks,
        window=recent_size if window is None else window,
        positions="original",
    )


def _import(
    source: Source,
    given: Given,
    format: str,
    table: Table,
    keep: Sequence[Sequence[bool]],
    stream: Streaming,
    notes: Notes,
) -> Import:
    import numpy as np

    layers, heads = len(table), len(table[0])
    shape = model_shape(given, source.path, num_layers=layers, num_kv_heads=heads)
    if shape.model.num_layers != layers:
        raise ArtifactError(f"has {layers} layers, the model has {shape.model.num_layers}")
    streams = f"stream_{stream.sinks}_{stream.window}"
    rows = shape.leave([tuple("full" if each else streams for each in row) for row in keep], notes, heads)
    counts = Counter(name for row in rows for name in row or ())
    if not counts:
        raise ArtifactError("every layer of the model slides: nothing is left to choose")
    notes.file("same", f"{counts[streams]} of {counts.total()} KV heads stream")
    policies: dict[str, Policy] = {"full": Full(), streams: stream}
    section = KVCache(
        policies={name: policy for name, policy in policies.items() if counts[name]},
        layers=rows,
        imported=source.imported(format),
    )
    exact = counts.total() if format == "duo_attention" else counts["full"]
    return Import(
        artifact=shape.artifact(kv_cache=section),
        arrays={SCORES: np.array(table, dtype=np.float64)},
        report=notes.report(layers * heads, exact, _UNIT),
    )


def _written(
    artifact: Artifact, arrays: Mapping[str, Array], *, inclusive: bool
) -> tuple[Table, float, Streaming, Report]:
    """The scores, the threshold that parts them (itself kept where `inclusive`), and how the others stream."""
    section, model, notes = artifact.kv_cache, artifact.model, Notes()
    if section is None:
        raise ArtifactError("the artifact has no kv_cache section, which is what this format is about")
    named = [section.heads(layer, model.num_kv_heads) for layer in range(model.num_layers)]
    rows = [None if row is None else [section.policies[name] for name in row] for row in named]
    streams = [policy for row in rows for policy in row or () if isinstance(policy, Streaming)]
    sizes = Counter((policy.sinks, policy.window) for policy in streams)
    sinks, window = sizes.most_common(1)[0][0] if sizes else (SINKS, WINDOW)
    stream = Streaming(sinks=sinks, window=window, positions="original")
    exact, full = 0, list[list[bool]]()
    for row in rows:
        if row is None:
            full.append([True] * model.num_kv_heads)
            notes.heads("not carried over", "a layer that slides over its own window is full", model.num_kv_heads)
            continue
        full.append([not isinstance(policy, Streaming) for policy in row])
        for policy in row:
            exact += isinstance(policy, Full) or (inclusive and policy == stream)
            if not isinstance(policy, Full | Streaming):
                notes.heads("computes more", f"{policy.kind} is written as full")
            elif isinstance(policy, Streaming) and not inclusive:
                notes.heads("keeps less", "nothing of a context is kept, here sinks and a window")
            elif isinstance(policy, Streaming) and (policy.sinks, policy.window) != (sinks, window):
                notes.heads("chooses otherwise", f"all heads stream over {sinks} sinks and {window} tokens")
            elif isinstance(policy, Streaming) and policy.positions == "cache":
                notes.heads("chooses otherwise", "positions are those in the text, not in the cache")
    notes.left_out(artifact, "kv_cache")
    table, at = _values(full, arrays)
    heads = model.num_layers * model.num_kv_heads
    if inclusive:
        notes.file("same", f"serve it with a threshold of {at:.6g}")
    else:
        kept = sum(map(sum, full))
        # Every ratio between kept / heads and (kept + 1) / heads cuts here.
        ratio = min((kept + 0.5) / heads, 1.0)
        notes.file("same", f"serve it with a ratio of {ratio:.6g}")
    return table, at, stream, notes.report(heads, exact, _UNIT)


def _values(full: Sequence[Sequence[bool]], arrays: Mapping[str, Array]) -> tuple[Table, float]:
    """The table and a threshold that parts it: the imported values, if they still say the same as the policies."""
    known = array(arrays, SCORES, (len(full), len(full[0])))
    if known is not None:
        flat = list(zip(known.ravel().tolist(), (keep for row in full for keep in row), strict=True))
        least = min((value for value, keep in flat if keep), default=math.inf)
        if all(value < least for value, keep in flat if not keep):
            return known.tolist(), least if math.isfinite(least) else 2.0
    return [[float(keep) for keep in row] for row in full], THRESHOLD


def _table(text: str) -> Table:
    table = Table()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if len(table) == MOST or line.count("\t") >= MOST:
            raise ArtifactError(f"line {number}: more than {MOST} layers or heads make no sense")
        try:
            row = [float(cell) for cell in line.split("\t")]
        except ValueError:
            raise ArtifactError(f"line {number}: must be numbers with tabs between, got {shorten(line)}") from None
        if not all(math.isfinite(value) for value in row):
            raise ArtifactError(f"line {number}: must be finite numbers, got {shorten(line)}")
        if table and len(row) != len(table[0]):
            raise ArtifactError(f"line {number}: has {len(row)} values, the lines before have {len(table[0])}")
        table.append([min(max(value, 0.0), 1.0) for value in row])
    if not table:
        raise ArtifactError("has no line of values")
    return table


def _duo_config(file: Path) -> dict[str, Any] | None:
    """DuoAttention's config.json; None where there is none, or it is another one, such as a model's."""
    if not file.is_file():
        return None
    with naming(file):
        config = Source.read(file).json()
        if not isinstance(config, dict) or not config.keys() >= _SIZES.keys():
            return None
        for name, least in _SIZES.items():
            size = config[name]
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ArtifactError(f"{name}: must be a whole number from {least} on, got {shorten(size)}")
        return config
