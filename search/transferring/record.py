"""Writes the artifact of a transfer: patterns taken over, patterns found again, and each head's drift beside them.

Shapes: L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from artifacts import Artifact, ModelInfo, pattern_name
from artifacts.merging import section_of
from artifacts.sections import save_searched
from search.common.measures import MEASURES
from search.common.scores import winners
from search.transferring.drift import Drift
from search.transferring.rules import Head, Replacement

if TYPE_CHECKING:
    from artifacts.sidecar import Array


def write_transferred(
    out: Path,
    command: str,
    source: Artifact,
    arrays: Mapping[str, Array],
    model: ModelInfo,
    drift: Drift,
    again: Mapping[Head, Replacement],
) -> Artifact:
    """Put the artifact together and write it to `out` with its sidecar.

    Evidence, the front and the sections of decode and caches stay behind: they were found on the other model.
    """
    assert source.search is not None
    patterns = dict(source.patterns)
    rows = [None if row is None else list(row) for row in source.prefill.layers]
    for (layer, head), found in again.items():
        row = rows[layer]
        assert row is not None, "only heads that were searched can have moved"
        row[head] = pattern_name(found.pattern)
        patterns[row[head]] = found.pattern
    used = {name: patterns[name] for row in rows for name in row or ()}
    kept = _here(arrays, drift, again)
    layers = tuple(None if row is None else tuple(row) for row in rows)
    means = {name: float(np.nanmean(kept[f"chosen.{name}"])) for name in MEASURES}
    summary = source.search.summary.model_copy(update={**means, "winners": winners(layers, used)})
    heads = sum(summary.winners.values())
    taken = f"from {source.model.name} ({source.content_sha256[:8]})"
    said = f"{command}  # {taken}: {len(again)} of {heads} heads searched again"
    search = source.search.model_copy(update={"command": said, "summary": summary})
    artifact = Artifact(
        model=model,
        search=search,
        patterns=used,
        prefill=source.prefill.model_copy(update={"layers": layers, "front": None}),
        costs=source.costs,
    )
    return save_searched(artifact, out, kept)


def _here(arrays: Mapping[str, Array], drift: Drift, again: Mapping[Head, Replacement]) -> dict[str, np.ndarray]:
    """The sidecar's arrays, with the scores that were measured on this model in place of the other's."""
    kept = {name: np.array(array) for name, array in arrays.items() if section_of(name) == "prefill"}
    for cost in ("chosen.seconds", "chosen.flops"):
        if cost in kept:
            kept[cost] *= drift.here.density / arrays["chosen.density"]
    before = np.maximum(drift.before, np.finfo(np.float32).tiny)
    for loss in {"chosen.change", "chosen.objective"} & kept.keys():
        kept[loss] *= np.where(drift.before > 0, drift.here.error / before, 1.0) ** 2
    for measure in MEASURES:
        kept[f"chosen.{measure}"] = np.array(getattr(drift.here, measure), dtype=np.float32)
    searched = np.zeros_like(drift.before, dtype=np.uint8)
    for at, found in again.items():
        searched[at] = 1
        for name, value in found.values.items():
            if name in kept:
                kept[name][at] = value
    return kept | {
        "transfer.again": searched,
        "transfer.before": np.array(drift.before, dtype=np.float32),
        "transfer.drift": drift.by_head,
    }
