"""DuoAttention's full_attention_heads.tsv, from and to policies of KV heads.

A row for each layer, a column for each KV head, tabs between: the share of full attention that the head learned to
want, clipped to 0 to 1. Heads at or above a threshold keep all; the others keep the first sink_size tokens and the last
recent_size at their positions in the text. These sizes stand in the config.json beside the table, which is not a
model's.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, naming, shorten
from artifacts.fields import MOST
from artifacts.interop.kv_heads import (
    SINKS,
    SLIDES,
    THRESHOLD,
    UNIT,
    WINDOW,
    Table,
    head_policies,
    import_heads,
    parted_scores,
    streaming,
)
from artifacts.interop.report import Export, Import, Notes
from artifacts.interop.shape import Given
from artifacts.interop.source import Source
from artifacts.kv_cache import AnyPolicy, Full, Streaming
from artifacts.schema import Artifact

if TYPE_CHECKING:
    from artifacts.sidecar import Array

# The sizes in config.json, and the least of each.
_SIZES = {"sink_size": 0, "recent_size": 1}


def read(source: Source, given: Given) -> Import:
    """Read a table into an artifact that has a kv_cache section and no patterns.

    Heads of 0.5 and more keep everything where nobody says otherwise. The sizes of the others are by default those of
    DuoAttention's config.json beside the table, or 128 and 256.

    Raises:
        ArtifactError: the file is no such table, or does not fit the model.
    """
    table = _table(source.text())
    notes = Notes()
    cut = THRESHOLD if given.threshold is None else given.threshold
    if given.sparsity is not None:
        ascending = sorted(chain.from_iterable(table))
        count = round(given.sparsity * len(ascending))
        cut = math.inf if count == len(ascending) else ascending[count]
        if count and ascending[count - 1] == cut:
            both = f"values of {cut:.6g} lie on both sides of the cut: all of them keep everything"
            notes.file("chooses otherwise", both)
    config = _config(source.path.with_name("config.json")) or {"sink_size": SINKS, "recent_size": WINDOW}
    stream = streaming(given, sinks=config["sink_size"], window=config["recent_size"])
    notes.file("same", f"KV heads of {cut:.6g} and above keep everything")
    keep = [[value >= cut for value in row] for row in table]
    return import_heads(source, given, format="duo_attention", table=table, keep=keep, stream=stream, notes=notes)


def write(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Write the table and its config.json beside it.

    Values that were imported are written as they were read, if a threshold still parts the heads; otherwise 1 and 0.

    Raises:
        ArtifactError: the artifact has no kv_cache section, or another config.json lies beside `out`.
    """
    beside = out.with_name("config.json")
    if beside.exists() and _config(beside) is None:
        with naming(beside):
            raise ArtifactError("is there and not DuoAttention's: write the table into a folder of its own")
    policies = head_policies(artifact)
    sinks, window = _commonest_sizes(policies)
    notes = Notes()
    exact = 0
    for policy in chain.from_iterable(policies):
        if policy is None:
            notes.heads("not carried over", SLIDES)
        elif isinstance(policy, Full):
            exact += 1
        elif not isinstance(policy, Streaming):
            notes.heads("computes more", f"{policy.kind} is written as full")
        elif (policy.sinks, policy.window) != (sinks, window):
            notes.heads("chooses otherwise", f"all heads stream over {sinks} sinks and {window} tokens")
        elif policy.positions == "cache":
            notes.heads("chooses otherwise", "positions are those in the text, not in the cache")
        else:
            exact += 1
    notes.left_out(artifact, "kv_cache")
    table, threshold = parted_scores(policies, arrays)
    notes.file("same", f"serve it with a threshold of {threshold:.6g}")
    lines = ["\t".join(f"{value:.18e}" for value in row) + "\n" for row in table]
    config = {"sink_size": sinks, "recent_size": window, "threshold": threshold}
    heads = artifact.model.num_layers * artifact.model.num_kv_heads
    return Export(
        files={out: "".join(lines).encode(), beside: json.dumps(config).encode() + b"\n"},
        report=notes.report(heads, exact, UNIT),
    )


def _commonest_sizes(policies: Sequence[Sequence[AnyPolicy | None]]) -> tuple[int, int]:
    """Sinks and window that most streaming heads have."""
    sizes = Counter(
        (policy.sinks, policy.window) for policy in chain.from_iterable(policies) if isinstance(policy, Streaming)
    )
    if not sizes:
        return SINKS, WINDOW
    return sizes.most_common(1)[0][0]


def _table(text: str) -> Table:
    """The values of a table, clipped to 0 to 1.

    Raises:
        ArtifactError: a line is no row of finite numbers as long as those before, or there are too many or none.
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
            raise ArtifactError(f"line {number}: must be numbers with tabs between, got {shorten(line)}") from None
        if not all(math.isfinite(value) for value in row):
            raise ArtifactError(f"line {number}: must be finite numbers, got {shorten(line)}")
        if table and len(row) != len(table[0]):
            raise ArtifactError(f"line {number}: has {len(row)} values, the lines before have {len(table[0])}")
        table.append([min(max(value, 0.0), 1.0) for value in row])
    if not table:
        raise ArtifactError("has no line of values")
    return table


def _config(file: Path) -> dict[str, Any] | None:
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
