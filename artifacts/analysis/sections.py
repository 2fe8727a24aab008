"""Writing what a search found into a file where other commands have their sections."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError
from artifacts.schema.artifact import Artifact
from artifacts.schema.model import ModelInfo
from artifacts.store.windows import seen_windows, window_arrays
from artifacts.store.write import save, update

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

_OF_OTHERS = ("decode", "kv_cache")
# The arrays of a section, by how their names begin; all others are those of prefill.
_ARRAYS = {"decode": ("similarity.",), "kv_cache": ("kv_cache.", "imported.full_attention")}
# What a person calls a model does not make it another one.
_NAMES = {"name", "revision"}


def section_of(array: str) -> str:
    """Section that a sidecar's array belongs to, by its name: decode, kv_cache or prefill."""
    return next(
        (section for section, begins in _ARRAYS.items() if array.startswith(begins)), "prefill"
    )


def save_searched(
    artifact: Artifact, path: str | os.PathLike[str], arrays: Mapping[str, Array]
) -> Artifact:
    """Write a search's result to `path`, and keep sections of the same model's artifact there.

    Their arrays are kept with them, and so are the windows of text that their searches have seen.
    Their evidence is not: it was measured with the patterns that
    are replaced. What is no whole artifact, or of another model, is replaced altogether.

    Returns:
        The artifact as save() returns it.

    Raises:
        ArtifactError: as save().
        HeadwiseError: as save() and update().
    """
    try:
        return update(
            path, lambda old, old_arrays: _with_sections(artifact, arrays, old, old_arrays)
        )
    except ArtifactError:
        # Nothing there to be kept; or what is wrong is the artifact itself, and save says so.
        return save(artifact, path, arrays)


def _with_sections(
    artifact: Artifact, arrays: Mapping[str, Array], old: Artifact, old_arrays: Mapping[str, Array]
) -> tuple[Artifact, Mapping[str, Array]]:
    if _identity(old.model) != _identity(artifact.model):
        return artifact, arrays
    kept = {name: getattr(old, name) for name in _OF_OTHERS if getattr(artifact, name) is None}
    kept = {name: section for name, section in kept.items() if section is not None}
    theirs = {name: array for name, array in old_arrays.items() if section_of(name) in kept}
    merged = artifact.model_copy(update=kept)
    # The list does not say which search saw a window: while a section of others is there, all of
    # them count.
    return with_seen(merged, {**theirs, **arrays}, seen_windows(old_arrays) if kept else ())


def put_section(
    imported: Artifact, arrays: Mapping[str, Array], old: Artifact, old_arrays: Mapping[str, Array]
) -> tuple[Artifact, dict[str, Array]]:
    """The artifact `old` with the section that an import is about, and with its arrays.

    With other patterns go the search and the evidence of those before."""
    section = "prefill" if imported.kv_cache is None else "kv_cache"
    fields = {
        "prefill": ("search", "patterns", "prefill", "evidence"),
        "kv_cache": ("kv_cache",),
    }[section]
    changes = {name: getattr(imported, name) for name in fields}
    kept = {name: array for name, array in old_arrays.items() if section_of(name) != section}
    return old.model_copy(update=changes), {**kept, **arrays}


def with_seen(
    artifact: Artifact, arrays: Mapping[str, Array], digests: Iterable[str]
) -> tuple[Artifact, dict[str, Array]]:
    """The artifact and its arrays with these windows of text besides those that it lists as seen.

    An artifact that was not searched lists none.
    """
    if artifact.search is None:
        return artifact, dict(arrays)
    windows = {*seen_windows(arrays), *digests}
    calibration = artifact.search.calibration.model_copy(update={"seen_windows": len(windows)})
    search = artifact.search.model_copy(update={"calibration": calibration})
    return artifact.model_copy(update={"search": search}), {**arrays, **window_arrays(windows)}


def _identity(model: ModelInfo) -> dict[str, object]:
    return model.model_dump(exclude=_NAMES)
