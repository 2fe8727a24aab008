"""An artifact on another model: a fine-tune of the one that was searched, or that of an import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, Evidence, HeadwiseError, save, update
from artifacts.analysis.sections import check_measured, section_of
from profiling.models.loading import LoadedModel
from runtime.fingerprint import config_info, fingerprint
from runtime.layers import attention_layers, full_layers, text_config

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Fields of another shape, the first ones are those that a person recognises. Without the hash of
# the configuration: a fine-tune may have more words.
_SHAPE = ("architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")


def check_shape(artifact: Artifact, loaded: LoadedModel) -> None:
    """Raise HeadwiseError where heads, layers or positions are not those of the artifact."""
    expected = artifact.model
    actual = config_info(text_config(loaded.model), type(loaded.model).__name__, loaded.name)
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

    Open fields of an import's fingerprint are filled in. Of other weights the front, the sections
    decode and kv_cache, and times are left out: they were measured on the former weights.

    Args:
        loaded: the model.
        source: the file of the artifact that was measured.
        out: the file to write, which may be the same.
        artifact: the artifact that was measured.
        arrays: of its sidecar.
        evidence: of the model.

    Returns:
        The names of the omitted sections.

    Raises:
        HeadwiseError: `out` is the same file, and has another artifact by now.
    """
    model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
    if artifact.model.weights_sha256 in (None, model.weights_sha256):
        checked = {
            "verdict": evidence.verdict,
            "chosen_on": None,
            "reported_on": evidence.reported_on,
            "tasks": evidence.tasks,
        }
        evidence = artifact.evidence.model_copy(update=checked)
        filled = artifact.model_copy(update={"model": model, "evidence": evidence})
        _write(source, out, artifact, filled, arrays)
        return ()
    prefill = artifact.prefill.model_copy(update={"front": None})
    used = {name for row in prefill.layers for name in row or ()}
    changes: dict[str, Any] = {
        "model": model,
        "evidence": evidence,
        "prefill": prefill,
        "patterns": {name: pattern for name, pattern in artifact.patterns.items() if name in used},
        "decode": None,
        "kv_cache": None,
    }
    own_arrays = {
        name: np.asarray(array) for name, array in arrays.items() if section_of(name) == "prefill"
    }
    _write(source, out, artifact, artifact.model_copy(update=changes), own_arrays)
    sections = {
        "front": artifact.prefill.front,
        "decode": artifact.decode,
        "kv_cache": artifact.kv_cache,
    }
    return tuple(name for name, section in sections.items() if section is not None)


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
