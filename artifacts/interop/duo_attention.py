"""DuoAttention's full_attention_heads.tsv, from and to policies of KV heads.

The table is tab-separated, with one row per layer and one column per KV head. A value is the
learned weight of full attention in the head, clipped to [0, 1]. Heads at or above a threshold keep
all tokens. The others keep the first sink_size tokens and the last recent_size tokens at their
positions in the text. These sizes are in DuoAttention's config.json in the same folder, which is
not the config.json of a model.

In decode, a token sees recent_size tokens and itself, which is a window of recent_size + 1 here.
Prefill is chunked: the first chunk is dense in all heads, and a query of a later chunk also sees
all of its chunk.

An export writes the imported scores if a threshold separates them as the artifact's policies do.
Otherwise it writes 1 and 0.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, naming, shorten
from artifacts.files import followed
from artifacts.interop.format import Format
from artifacts.interop.report import Export, Import, Notes
from artifacts.interop.shape import ImportOptions, model_shape
from artifacts.interop.source import Source
from artifacts.schema.artifact import Artifact
from artifacts.schema.fields import MOST
from artifacts.schema.kv_cache import AnyPolicy, Full, KVCache, Policy, Streaming

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

Table = list[list[float]]
_SCORES = "imported.full_attention"
# Default sizes in config.json.
_DEFAULTS = {"sink_size": 128, "recent_size": 256}
# Between the 1 of a full head and the 0 of a streaming head.
_THRESHOLD = 0.5
_UNIT = "KV head"
# Upper bound of the noise that DuoAttention adds to every value, which breaks ties.
_NOISE = 1e-6
# Sizes in config.json with their minimums.
_SIZES = {"sink_size": 0, "recent_size": 1}


def read(source: Source, options: ImportOptions) -> Import:
    """Read a table into an artifact that has a kv_cache section and no patterns.

    Without a threshold or a sparsity, heads with values of at least 0.5 keep everything. The
    default sizes of the other heads are from DuoAttention's config.json in the same folder, or 128
    and 256.

    Raises:
        ArtifactError: the file is not such a table, or does not fit the model.
    """
    import numpy as np

    table = _table(source.text())
    num_layers = len(table)
    num_kv_heads = len(table[0])
    heads = [(layer, head) for layer in range(num_layers) for head in range(num_kv_heads)]
    values = list(chain.from_iterable(table))
    notes = Notes()
    if options.sparsity is None:
        if options.threshold is None:
            threshold = _THRESHOLD
        else:
            threshold = options.threshold
        streams = [value < threshold for value in values]
        by_chance = [threshold - _NOISE < value < threshold for value in values]
        notes.file("same", f"KV heads of {threshold:.6g} and above keep everything")
    else:
        streams = _lowest(values, options.sparsity)
        by_chance = _drawn(values, streams)
    notes.heads(
        "chooses otherwise",
        "tie at the cut: DuoAttention draws, here the first of them stream",
        sum(by_chance),
    )
    shape = model_shape(options, source.path, num_layers=num_layers, num_kv_heads=num_kv_heads)
    if shape.model.num_layers != num_layers:
        raise ArtifactError(f"has {num_layers} layers, the model has {shape.model.num_layers}")
    stream = _streaming(source.path, options)
    stream_name = f"stream_{stream.sinks}_{stream.window}"
    policies: dict[str, Policy] = {"full": Full(), stream_name: stream}
    full = {at for at, is_streaming in zip(heads, streams, strict=True) if not is_streaming}
    names = [
        tuple("full" if (layer, head) in full else stream_name for head in range(num_kv_heads))
        for layer in range(num_layers)
    ]
    rows = shape.leave(names, notes, num_kv_heads)
    counts = Counter(name for row in rows for name in row or ())
    if not counts:
        raise ArtifactError("every layer of the model slides: nothing is left to choose")
    notes.heads(
        "keeps less",
        f"a query of a prompt sees {stream.sinks} sinks and {stream.window} tokens; there all of "
        "its chunk, too",
        counts[stream_name],
    )
    notes.file("same", f"{counts[stream_name]} of {counts.total()} KV heads stream")
    section = KVCache(
        policies={name: policy for name, policy in policies.items() if counts[name]},
        layers=rows,
        imported=source.imported("duo_attention"),
    )
    drawn = {at for at, chance in zip(heads, by_chance, strict=True) if chance}
    full_by_chance = sum(rows[layer] is not None for layer, head in drawn & full)
    return Import(
        artifact=shape.artifact(kv_cache=section),
        arrays={_SCORES: np.array(table, dtype=np.float64)},
        report=notes.report(len(values), counts["full"] - full_by_chance, _UNIT),
    )


def write(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Write the table, and its config.json in the same folder.

    Imported values are written unchanged if a threshold still separates the heads. Otherwise, full
    heads get 1 and streaming heads get 0.

    Raises:
        ArtifactError: the artifact has no kv_cache section, or the folder of `out` has another
            config.json.
    """
    config_file = out.with_name("config.json")
    if os.path.exists(config_file) and _config(config_file) is None:
        with naming(config_file):
            raise ArtifactError(
                "exists and is not DuoAttention's: write the table into another folder"
            )
    policies = _head_policies(artifact)
    sinks, window = _commonest_sizes(policies)
    recent = max(window - 1, 1)
    notes = Notes()
    exact = 0
    for policy in chain.from_iterable(policies):
        if policy is None:
            notes.heads("not carried over", "a layer that slides over its own window is full")
        elif isinstance(policy, Full):
            exact += 1
        elif not isinstance(policy, Streaming):
            notes.heads("computes more", f"{policy.kind} is written as full")
        elif (policy.sinks, policy.window) != (sinks, window):
            notes.heads(
                "chooses otherwise", f"all heads stream over {sinks} sinks and {window} tokens"
            )
        elif policy.positions == "cache":
            notes.heads("chooses otherwise", "positions are those in the text, not in the cache")
        else:
            notes.heads(
                "computes more",
                "in prefill a query sees its whole chunk, here its sinks and window alone",
            )
    if recent + 1 != window:
        notes.file(
            "computes more",
            f"a token sees {recent} before itself, which is the least; here {window - 1}",
        )
    notes.left_out(artifact, "kv_cache")
    table, threshold = _scores(policies, arrays)
    notes.file("same", f"serve it with a threshold of {threshold:.6g}")
    lines = ["\t".join(f"{value:.18e}" for value in row) + "\n" for row in table]
    config = {"sink_size": sinks, "recent_size": recent, "threshold": threshold}
    heads = artifact.model.num_layers * artifact.model.num_kv_heads
    return Export(
        files={out: "".join(lines).encode(), config_file: json.dumps(config).encode() + b"\n"},
        report=notes.report(heads, exact, _UNIT),
    )


def _streaming(table: Path, options: ImportOptions) -> Streaming:
    """Make the policy of streaming heads: sizes of the user, of config.json, or the defaults."""
    # Next to the table, or to a link on the way to it.
    neighbors = (place.with_name("config.json") for place in followed(table))
    config = next((each for each in map(_config, neighbors) if each), _DEFAULTS)
    sinks = config["sink_size"]
    window = config["recent_size"] + 1
    if options.sinks is not None:
        sinks = options.sinks
    if options.window is not None:
        window = options.window
    return Streaming(sinks=sinks, window=window, positions="original")


def _lowest(values: Sequence[float], sparsity: float) -> list[bool]:
    """Mark heads below NumPy's quantile of the values as streaming; of tied heads, the first."""
    if sparsity >= 1:
        return [True] * len(values)
    # The number of values below the quantile among n values without ties.
    count = math.ceil(sparsity * (len(values) - 1))
    ascending = sorted(range(len(values)), key=values.__getitem__)
    lowest = set(ascending[:count])
    return [head in lowest for head in range(len(values))]


def _drawn(values: Sequence[float], streams: Sequence[bool]) -> list[bool]:
    """Mark heads that stream or not depending on DuoAttention's noise."""
    largest_streaming = max(
        (value for value, stream in zip(values, streams, strict=True) if stream), default=-math.inf
    )
    least_full = min(
        (value for value, stream in zip(values, streams, strict=True) if not stream),
        default=math.inf,
    )
    return [least_full - _NOISE < value < largest_streaming + _NOISE for value in values]


def _head_policies(artifact: Artifact) -> list[list[AnyPolicy | None]]:
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


def _scores(
    policies: Sequence[Sequence[AnyPolicy | None]], arrays: Mapping[str, Array]
) -> tuple[Table, float]:
    """Return the scores to write, and the threshold that only streaming heads do not reach."""
    keep = [[not isinstance(policy, Streaming) for policy in row] for row in policies]
    imported = arrays.get(_SCORES)
    if imported is not None and imported.shape == (len(keep), len(keep[0])):
        table: Table = imported.tolist()
        pairs = [
            (value, kept)
            for values, row in zip(table, keep, strict=True)
            for value, kept in zip(values, row, strict=True)
        ]
        least_kept = min((value for value, kept in pairs if kept), default=math.inf)
        if all(value < least_kept for value, kept in pairs if not kept):
            return table, least_kept if math.isfinite(least_kept) else 2.0
    return [[float(kept) for kept in row] for row in keep], _THRESHOLD


def _commonest_sizes(policies: Sequence[Sequence[AnyPolicy | None]]) -> tuple[int, int]:
    """Return the most common sinks and window of the streaming heads."""
    sizes = Counter(
        (policy.sinks, policy.window)
        for policy in chain.from_iterable(policies)
        if isinstance(policy, Streaming)
    )
    if not sizes:
        return _DEFAULTS["sink_size"], _DEFAULTS["recent_size"]
    return sizes.most_common(1)[0][0]


def _table(text: str) -> Table:
    """Parse the values of a table, clipped to [0, 1].

    Raises:
        ArtifactError: a line is not a row of finite numbers with the length of the earlier rows, or
            the table is empty or too large.
    """
    table = Table()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if len(table) == MOST or line.count("\t") >= MOST:
            raise ArtifactError(f"line {number}: more than {MOST} layers or heads make no sense")
        try:
            row = [float(cell) for cell in line.split("\t")]
        except ValueError:
            raise ArtifactError(
                f"line {number}: must be numbers with tabs between, got {shorten(line)}"
            ) from None
        if not all(math.isfinite(value) for value in row):
            raise ArtifactError(f"line {number}: must be finite numbers, got {shorten(line)}")
        if table and len(row) != len(table[0]):
            raise ArtifactError(
                f"line {number}: has {len(row)} values, the lines before have {len(table[0])}"
            )
        table.append([min(max(value, 0.0), 1.0) for value in row])
    if not table:
        raise ArtifactError("has no line of values")
    return table


def _config(file: Path) -> dict[str, Any] | None:
    """Read DuoAttention's config.json; None if it is missing or belongs to a model."""
    if not os.path.isfile(file):
        return None
    with naming(file):
        config = Source.read(file).json()
        if not isinstance(config, dict) or not config.keys() >= _SIZES.keys():
            return None
        for name, minimum in _SIZES.items():
            size = config[name]
            if not isinstance(size, int) or isinstance(size, bool) or size < minimum:
                raise ArtifactError(
                    f"{name}: must be a whole number from {minimum} on, got {shorten(size)}"
                )
        return config


FORMAT = Format(
    name="duo_attention",
    about="DuoAttention's full_attention_heads.tsv, next to its config.json",
    read=read,
    write=write,
    files=("*.tsv",),
    options=("sinks", "window", "threshold", "sparsity"),
)
