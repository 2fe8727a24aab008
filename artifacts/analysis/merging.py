"""One artifact out of sections of several, all for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, one_line
from artifacts.schema.artifact import Artifact, now
from artifacts.schema.model import ModelInfo

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# What tells two models apart, from what a person recognises first to the hashes; not the name, that
# a person gives.
_COMPARED = (
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "architecture",
    "rope",
    "config_sha256",
    "weights_sha256",
)
# The arrays of a section, by how their names begin; all others are those of prefill.
_ARRAYS = {
    "decode": ("similarity.", "imported.decode"),
    "kv_cache": ("kv_cache.", "imported.full_attention"),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """An artifact with its file, for errors, and its arrays."""

    file: Path
    artifact: Artifact
    arrays: Mapping[str, Array]


def merge(
    base: Part, prefill: Part, decode: Part | None, kv_cache: Part | None
) -> tuple[Artifact, dict[str, Array]]:
    """Combine sections, with their arrays, of several artifacts; None leaves a section out.

    `base` has to be for the same model, and what it knows of it counts. Search, patterns and all
    other fields are those of `prefill`. Evidence is kept of all parts, each entry once: measured on
    the parts, not on the whole.

    Raises:
        ArtifactError: the parts are for unlike models (the first field that differs is named), a
            part lacks the section that it was named for, or the sections do not go together.
    """
    model = _one_model(prefill.artifact.model, base, prefill)
    parts = {"prefill": prefill, "decode": decode, "kv_cache": kv_cache}
    for name, part in parts.items():
        if part is None:
            continue
        model = _one_model(model, part, prefill)
        if name != "prefill" and getattr(part.artifact, name) is None:
            raise ArtifactError(f"{one_line(str(part.file))}: has no {name} section")
    given = [part for part in parts.values() if part is not None]
    entries = {
        e.model_dump_json(): e for part in given for e in part.artifact.evidence.measurements
    }
    arrays = {
        name: array for name, array in prefill.arrays.items() if section_of(name) == "prefill"
    }
    for section, part in parts.items():
        if part is None:
            continue
        for name, array in part.arrays.items():
            if section_of(name) == section:
                arrays[name] = array
    changes: dict[str, Any] = {
        "created_at": now(),
        "model": model,
        "decode": None if decode is None else decode.artifact.decode,
        "kv_cache": None if kv_cache is None else kv_cache.artifact.kv_cache,
        "evidence": prefill.artifact.evidence.model_copy(
            update={"measurements": tuple(entries.values())}
        ),
    }
    return prefill.artifact.model_copy(update=changes), arrays


def section_of(array: str) -> str:
    """Section that a sidecar's array belongs to, by its name: decode, kv_cache or prefill."""
    return next(
        (section for section, begins in _ARRAYS.items() if array.startswith(begins)), "prefill"
    )


def _one_model(model: ModelInfo, part: Part, first: Part) -> ModelInfo:
    """The model, with what this part knows of it beside; an import knows less."""
    other = part.artifact.model
    for field in _COMPARED:
        mine = getattr(model, field)
        theirs = getattr(other, field)
        if mine is not None and theirs is not None and mine != theirs:
            raise ArtifactError(
                f"these artifacts are for unlike models: {field} is {mine} in "
                f"{one_line(str(first.file))}, {theirs} in {one_line(str(part.file))}"
            )
    learnt = {field: getattr(other, field) for field in _COMPARED if getattr(model, field) is None}
    if learnt.get("weights_sha256") is not None:
        # A fingerprint is of the model that has the name.
        learnt |= {
            "name": other.name,
            "revision": other.revision,
            "max_positions": other.max_positions,
        }
    return model.model_copy(update=learnt)
