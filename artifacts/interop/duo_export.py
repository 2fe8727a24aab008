"""From a kv_cache section to DuoAttention's table and its config.json, with a report."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError
from artifacts.interop.duo import SINKS, THRESHOLD, WINDOW
from artifacts.interop.report import Notes, Report
from artifacts.kv_cache import Full, Streaming
from artifacts.schema import Artifact

if TYPE_CHECKING:
    from artifacts.sidecar import Array


def export_duo(artifact: Artifact, arrays: Mapping[str, Array]) -> tuple[bytes, bytes, Report]:
    """The table's bytes, those of its config.json, and how true they are.

    Values that were imported are written as they were read, if a threshold still parts the heads; otherwise 1 and 0.

    Raises:
        ArtifactError: the artifact has no kv_cache section.
    """
    section, model = artifact.kv_cache, artifact.model
    if section is None:
        raise ArtifactError("the artifact has no kv_cache section, which is what duo_attention is about")
    streams = Counter(
        (policy.sinks, policy.window)
        for layer in range(model.num_layers)
        for name in section.heads(layer, model.num_kv_heads) or ()
        if isinstance(policy := section.policies[name], Streaming)
    )
    sinks, window = streams.most_common(1)[0][0] if streams else (SINKS, WINDOW)
    notes = Notes()
    exact, full = 0, list[list[bool]]()
    for layer in range(model.num_layers):
        names = section.heads(layer, model.num_kv_heads)
        if names is None:
            notes.add("not carried over", "a layer that slides over its own window is full", model.num_kv_heads)
            full.append([True] * model.num_kv_heads)
            continue
        policies = [section.policies[name] for name in names]
        full.append([not isinstance(policy, Streaming) for policy in policies])
        for policy in policies:
            exact += isinstance(policy, Full) or policy == Streaming(sinks=sinks, window=window, positions="original")
            if not isinstance(policy, Full | Streaming):
                notes.add("computes more", f"{policy.kind} is written as full")
            elif isinstance(policy, Streaming) and (policy.sinks, policy.window) != (sinks, window):
                notes.add("chooses otherwise", f"all heads stream over {sinks} sinks and {window} tokens")
            elif isinstance(policy, Streaming) and policy.positions == "cache":
                notes.add("chooses otherwise", "positions are those in the text, not in the cache")
    for name, there in (("prefill", artifact.patterns), ("decode", artifact.decode)):
        if there:
            notes.add("not carried over", f"the {name} section has no place in this format", 0)
    table, at = _values(full, arrays)
    notes.add("same", f"serve it with a threshold of {at:.6g}", 0)
    text = "".join("\t".join(f"{value:.18e}" for value in row) + "\n" for row in table)
    config = json.dumps({"sink_size": sinks, "recent_size": window, "threshold": at}) + "\n"
    report = Report(heads=model.num_layers * model.num_kv_heads, exact=exact, notes=notes.all())
    return text.encode(), config.encode(), report


def _values(full: Sequence[Sequence[bool]], arrays: Mapping[str, Array]) -> tuple[list[list[float]], float]:
    """The table and a threshold that parts it: the imported values, if they still say the same as the policies."""
    known = arrays.get("imported.full_attention")
    if known is not None and known.shape == (len(full), len(full[0])):
        values: list[list[float]] = known.tolist()
        flat = [
            (value, keep) for row, kept in zip(values, full, strict=True) for value, keep in zip(row, kept, strict=True)
        ]
        least = min((value for value, keep in flat if keep), default=math.inf)
        if all(value < least for value, keep in flat if not keep):
            return values, least if math.isfinite(least) else 2.0
    return [[float(keep) for keep in row] for row in full], THRESHOLD
