"""An artifact on another model: a fine-tune of the one that was searched, or that of an import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import (
    Artifact,
    Evidence,
    Front,
    HeadwiseError,
    ModelInfo,
    SearchInfo,
    Verdict,
    save,
    update,
)
from artifacts.analysis.sections import check_measured, section_of
from profiling.models.loading import LoadedModel
from runtime.fingerprint import config_info, fingerprint
from runtime.layers import attention_layers, full_layers, text_config
from search.model.frontier import scaled_loss

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Fields of another shape, the first ones are those that a person recognises. Without the hash of
# the configuration: a fine-tune may have more words.
_SHAPE = ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")

# Arrays that a search has measured on the weights.
_SCORES = ("chosen.", "candidates.", "allocation.")


def info_of(loaded: LoadedModel) -> ModelInfo:
    """The fingerprint of a loaded model without its weights, which takes no time."""
    return config_info(text_config(loaded.model), type(loaded.model).__name__, loaded.name)


def check_shape(artifact: Artifact, loaded: LoadedModel) -> None:
    """Raise HeadwiseError where heads, layers or positions are not those of the artifact."""
    expected = artifact.model
    actual = info_of(loaded)
    for field in _SHAPE:
        wanted = getattr(expected, field)
        value = getattr(actual, field)
        if None not in (wanted, value) and wanted != value:
            raise HeadwiseError(
                f"{loaded.name} is no fine-tune of {expected.name}: {field} is {wanted} in the "
                f"artifact, {value} in it"
            )
    free = full_layers(attention_layers(loaded.model))
    for layer, row in enumerate(artifact.prefill.layers):
        if row is not None and layer not in free:
            raise HeadwiseError(
                f"layer {layer} has patterns in the artifact, but does not see every token in "
                "the model"
            )


def write_for(
    loaded: LoadedModel,
    source: Path,
    out: Path,
    artifact: Artifact,
    arrays: Mapping[str, Array],
    evidence: Evidence,
) -> tuple[str, ...]:
    """Write the artifact for a model, with the evidence measured on it.

    Open fields of an import's fingerprint are filled in, and the points of the front get the bound
    of the new verdict. Of other weights the front, the frontier, the scores of the search, the
    sections decode and kv_cache, and times are left out: they were measured on the former weights.

    Args:
        loaded: the model.
        source: the file of the artifact that was measured.
        out: the file to write, which may be the same.
        artifact: the artifact that was measured.
        arrays: of its sidecar.
        evidence: of the model.

    Returns:
        The names of the omitted sections, `frontier` and `scores` of the search among them.

    Raises:
        HeadwiseError: `out` is the same file, and has another artifact by now.
    """
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    if artifact.model.weights_sha256 in (None, model.weights_sha256):
        checked = {
            "verdict": evidence.verdict,
            "reported_on": evidence.reported_on,
            "tasks": evidence.tasks,
        }
        prefill = artifact.prefill
        if prefill.front is not None and evidence.verdict is not None:
            front = with_bound(prefill.front, evidence.verdict)
            prefill = prefill.model_copy(update={"front": front})
        evidence = artifact.evidence.model_copy(update=checked)
        changes: dict[str, Any] = {"model": model, "prefill": prefill, "evidence": evidence}
        filled = artifact.model_copy(update=changes)
        _write(source, out, artifact, filled, arrays)
        return ()
    prefill = artifact.prefill.model_copy(update={"front": None})
    used = {name for row in prefill.layers for name in row or ()}
    changes = {
        "model": model,
        "search": _without_scores(artifact.search),
        "evidence": evidence,
        "prefill": prefill,
        "patterns": {name: pattern for name, pattern in artifact.patterns.items() if name in used},
        "decode": None,
        "kv_cache": None,
    }
    own_arrays = {
        name: np.asarray(array)
        for name, array in arrays.items()
        if section_of(name) == "prefill" and not name.startswith(_SCORES)
    }
    _write(source, out, artifact, artifact.model_copy(update=changes), own_arrays)
    sections = {
        "front": artifact.prefill.front is not None,
        "frontier": artifact.search is not None and bool(artifact.search.frontier),
        "scores": artifact.search is not None,
        "decode": artifact.decode is not None,
        "kv_cache": artifact.kv_cache is not None,
    }
    return tuple(name for name, had in sections.items() if had)


def with_bound(front: Front, verdict: Verdict) -> Front:
    """The front with the bound of a new verdict at the served point.

    The other points get it in the ratio of their former bounds, and None where there was none.

    Args:
        front: with the bounds of an earlier gate.
        verdict: without a bound of answers the front stays as it is.
    """
    new = verdict.lost_high
    served = next((point for point in front.points if point.layers is None), None)
    if new is None or served is None:
        return front
    points = []
    for point in front.points:
        lost = None
        if point is served:
            lost = new
        elif point.lost is not None and served.lost is not None and served.lost > 0:
            is_cheaper = point.cost < served.cost
            ratio = point.lost / served.lost
            lost = min(scaled_loss(new, ratio, least=new if is_cheaper else None), 1.0)
        points.append(point.model_copy(update={"lost": lost}))
    return front.model_copy(update={"points": tuple(points)})


def _without_scores(search: SearchInfo | None) -> SearchInfo | None:
    """The record of a search without what it measured of the loss; how and on what stays."""
    if search is None:
        return None
    summary = search.summary.model_copy(update={"recall": None, "error": None})
    return search.model_copy(update={"frontier": (), "summary": summary})


def _write(
    source: Path,
    out: Path,
    measured: Artifact,
    artifact: Artifact,
    arrays: Mapping[str, Array],
) -> None:
    """Write an artifact in place of the one that was measured, or into another file."""
    if source.resolve() != out.resolve():
        save(artifact, out, arrays)
        return

    def change(now: Artifact, _: dict[str, Array]) -> tuple[Artifact, Mapping[str, Array]]:
        # Measuring took a while, and other commands write into the same file.
        check_measured(now, measured, source)
        return artifact, arrays

    update(source, change)
