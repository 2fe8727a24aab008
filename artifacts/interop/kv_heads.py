"""Scores of KV heads, by which some keep everything and the others stream: DuoAttention's table and KVzip's tensor.

full_attention_heads.tsv of DuoAttention has a row for each layer, a column for each KV head, tabs between: the share of
full attention that the head learned to want, clipped to 0 to 1. The heads at or above a threshold keep all; the others
keep the first sink_size tokens and the last recent_size at their positions in the text. These sizes stand in the
config.json beside the table, which is not a model's. KVzip's .pt is one tensor (layers, KV heads): the largest
attention that a head's keys get while the context is repeated. The heads above a threshold keep all, the others nothing
of the context.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, one_line, shorten
from artifacts.fields import MOST, MOST_HEADS, Imported
from artifacts.interop.files import bare, parse_json, parse_text, read_bytes
from artifacts.interop.report import Conversion, Notes, Report
from artifacts.interop.shape import Given, model_shape
from artifacts.interop.torch_file import read_tensor, write_tensor
from artifacts.kv_cache import Full, KVCache, Streaming
from artifacts.schema import Artifact

if TYPE_CHECKING:
    from artifacts.sidecar import Array

Table = list[list[float]]
Files = list[tuple[Path, bytes]]
SCORES = "imported.full_attention"
# DuoAttention's own where its config.json is not beside the table.
SINKS, WINDOW, THRESHOLD = 128, 256, 0.5
# KVzip advises to keep so much.
_KEPT = 0.6
_SIZES = ("sink_size", "recent_size")


def read_duo(
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
    table, notes = _table(path, parse_text(path, data)), Notes()
    at = _threshold(table, threshold, sparsity, notes)
    beside = _sizes_beside(path)
    stream = Streaming(
        sinks=sinks if sinks is not None else beside.get("sink_size", SINKS),
        window=window if window is not None else beside.get("recent_size", WINDOW),
        positions="original",
    )
    notes.add("same", f"KV heads of {at:.6g} and above keep everything", 0)
    return _conversion(
        path, data, "duo_attention", given, table, [[v >= at for v in row] for row in table], stream, notes
    )


def read_kvzip(
    path: Path,
    given: Given,
    *,
    sinks: int | None = None,
    window: int | None = None,
    threshold: float | None = None,
    sparsity: float | None = None,
) -> Conversion:
    """Read a tensor of head scores into an artifact that has a kv_cache section and no patterns.

    Args:
        path: the .pt file.
        given: what is known of the model beside the file.
        sinks, window: of the heads that do not keep everything, in tokens (128 and 256); KVzip keeps nothing there.
        threshold: heads with a score above this keep everything.
        sparsity: instead, the share of heads that do not, as KVzip cuts them: 0.4 unless a threshold is given.

    Raises:
        ArtifactError: the file is no such tensor, or does not fit the model.
    """
    data, notes = read_bytes(path), Notes()
    scores = read_tensor(path, data)
    if scores.ndim != 2 or not all(1 <= size <= MOST for size in scores.shape) or scores.size > MOST_HEADS:
        raise ArtifactError(f"{one_line(str(path))}: must be of shape (layers, KV heads), got {shorten(scores.shape)}")
    table: Table = scores.tolist()
    ordered = sorted((value for row in table for value in row), reverse=True)
    if not 0 <= ordered[-1] <= ordered[0] <= 1:
        raise ArtifactError(
            f"{one_line(str(path))}: must hold scores from 0 to 1, got {ordered[-1]:g} to {ordered[0]:g}"
        )
    if threshold is not None and sparsity is not None:
        raise ArtifactError("give --threshold or --sparsity, not both")
    # The head that lies at the cut is dropped there, too.
    kept = int(len(ordered) * (_KEPT if sparsity is None else 1 - sparsity))
    at = threshold if threshold is not None else ordered[kept - 1] if kept else math.inf
    stream = Streaming(sinks=SINKS if sinks is None else sinks, window=window or WINDOW, positions="original")
    keep = [[value > at for value in row] for row in table]
    dropped = sum(not each for row in keep for each in row)
    notes.some(
        "computes more", f"keeps {stream.sinks} sinks and {stream.window} tokens, there nothing of a context", dropped
    )
    notes.add("same", f"KV heads above {at:.6g} keep everything", 0)
    return _conversion(path, data, "kvzip", given, table, keep, stream, notes)


def write_duo(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> tuple[Files, Report]:
    """The table and its config.json beside it.

    Values that were imported are written as they were read, if a threshold still parts the heads; otherwise 1 and 0.

    Raises:
        ArtifactError: the artifact has no kv_cache section, or another config.json lies beside `out`.
    """
    beside = out.with_name("config.json")
    if beside.exists() and not _is_duo_config(parse_json(beside, read_bytes(beside))):
        raise ArtifactError(
            f"{one_line(str(beside))}: is there and not DuoAttention's: write the table into a folder of its own"
        )
    table, at, stream, report = _written(artifact, arrays, inclusive=True)
    text = "".join("\t".join(f"{value:.18e}" for value in row) + "\n" for row in table)
    config = {"sink_size": stream.sinks, "recent_size": stream.window, "threshold": at}
    return [(out, text.encode()), (beside, json.dumps(config).encode() + b"\n")], report


def write_kvzip(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> tuple[Files, Report]:
    """The tensor of scores: those that were imported, if a threshold still parts the heads; otherwise 1 and 0.

    Raises:
        ArtifactError: the artifact has no kv_cache section.
    """
    import numpy as np

    table, _, _, report = _written(artifact, arrays, inclusive=False)
    return [(out, write_tensor(np.array(table)))], report


def _conversion(
    path: Path,
    data: bytes,
    format: Any,
    given: Given,
    table: Table,
    keep: Sequence[Sequence[bool]],
    stream: Streaming,
    notes: Notes,
) -> Conversion:
    import numpy as np

    shape = model_shape(given, path, num_layers=len(table), num_kv_heads=len(table[0]))
    if shape.model.num_layers != len(table):
        raise ArtifactError(f"{one_line(str(path))}: has {len(table)} layers, the model has {shape.model.num_layers}")
    names = {True: "full", False: f"stream_{stream.sinks}_{stream.window}"}
    rows = [None if i in shape.sliding else tuple(names[each] for each in row) for i, row in enumerate(keep)]
    if all(row is None for row in rows):
        raise ArtifactError(f"{one_line(str(path))}: every layer of the model slides: nothing is left to choose")
    if left := sum(row is None for row in rows):
        notes.add(
            "not carried over", "the layer slides over a window of its own and is left alone", left * len(table[0])
        )
    counts = Counter(name for row in rows for name in row or ())
    notes.add("same", f"{counts[names[False]]} of {counts.total()} KV heads stream", 0)
    policies: dict[str, Full | Streaming] = {"full": Full(), names[False]: stream}
    section = KVCache(
        policies={name: policy for name, policy in policies.items() if counts[name]},
        layers=tuple(rows),
        imported=Imported(format=format, file=bare(path), sha256=hashlib.sha256(data).hexdigest()),
    )
    exact = counts.total() if format == "duo_attention" else counts["full"]
    report = Report(heads=len(table) * len(table[0]), exact=exact, unit="KV head", notes=notes.all())
    arrays = {SCORES: np.array(table, dtype=np.float64)}
    return Conversion(artifact=shape.artifact(kv_cache=section), arrays=arrays, report=report)


def _written(
    artifact: Artifact, arrays: Mapping[str, Array], *, inclusive: bool
) -> tuple[Table, float, Streaming, Report]:
    """The scores, the threshold that parts them (itself kept where `inclusive`), and how the others stream."""
    section, model, notes = artifact.kv_cache, artifact.model, Notes()
    if section is None:
        raise ArtifactError("the artifact has no kv_cache section, which is what this format is about")
    rows = [section.heads(layer, model.num_kv_heads) for layer in range(model.num_layers)]
    streams = Counter(p for row in rows for name in row or () if isinstance(p := section.policies[name], Streaming))
    sizes = Counter((policy.sinks, policy.window) for policy in streams.elements())
    sinks, window = sizes.most_common(1)[0][0] if sizes else (SINKS, WINDOW)
    exact, full = 0, list[list[bool]]()
    for row in rows:
        policies = [section.policies[name] for name in row or ()]
        full.append([not isinstance(policy, Streaming) for policy in policies] or [True] * model.num_kv_heads)
        if row is None:
            notes.add("not carried over", "a layer that slides over its own window is full", model.num_kv_heads)
        for policy in policies:
            exact += isinstance(policy, Full) or (
                inclusive and policy == Streaming(sinks=sinks, window=window, positions="original")
            )
            if not isinstance(policy, Full | Streaming):
                notes.add("computes more", f"{policy.kind} is written as full")
            elif isinstance(policy, Streaming) and not inclusive:
                notes.add("keeps less", "nothing of a context is kept, here sinks and a window")
            elif isinstance(policy, Streaming) and (policy.sinks, policy.window) != (sinks, window):
                notes.add("chooses otherwise", f"all heads stream over {sinks} sinks and {window} tokens")
            elif isinstance(policy, Streaming) and policy.positions == "cache":
                notes.add("chooses otherwise", "positions are those in the text, not in the cache")
    for name, there in (("prefill", artifact.patterns), ("decode", artifact.decode)):
        if there:
            notes.add("not carried over", f"the {name} section has no place in this format", 0)
    table, at = _values(full, arrays)
    if inclusive:
        notes.add("same", f"serve it with a threshold of {at:.6g}", 0)
    else:
        kept = sum(map(sum, full)) / (model.num_layers * model.num_kv_heads)
        notes.add("same", f"serve it with a ratio just above {kept:.6g}: the head at the cut is dropped", 0)
    report = Report(heads=model.num_layers * model.num_kv_heads, exact=exact, unit="KV head", notes=notes.all())
    return table, at, Streaming(sinks=sinks, window=window, positions="original"), report


def _values(full: Sequence[Sequence[bool]], arrays: Mapping[str, Array]) -> tuple[Table, float]:
    """The table and a threshold that parts it: the imported values, if they still say the same as the policies."""
    known = arrays.get(SCORES)
    if known is not None and known.shape == (len(full), len(full[0])):
        values: Table = known.tolist()
        flat = [
            (value, keep) for row, kept in zip(values, full, strict=True) for value, keep in zip(row, kept, strict=True)
        ]
        least = min((value for value, keep in flat if keep), default=math.inf)
        if all(value < least for value, keep in flat if not keep):
            return values, least if math.isfinite(least) else 2.0
    return [[float(keep) for keep in row] for row in full], THRESHOLD


def _table(path: Path, text: str) -> Table:
    shown, table = one_line(str(path)), Table()
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
    if not _is_duo_config(config):
        return {}
    for name, least in zip(_SIZES, (0, 1), strict=True):
        size = config[name]
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ArtifactError(f"{file}: {name}: must be a whole number from {least} on, got {shorten(size)}")
    return {name: config[name] for name in _SIZES}


def _is_duo_config(config: Any) -> bool:
    return isinstance(config, dict) and all(name in config for name in _SIZES)
