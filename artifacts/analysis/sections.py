"""Write search results to a file while keeping the sections of other commands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, HeadwiseError
from artifacts.schema.artifact import Artifact
from artifacts.schema.model import ModelInfo
from artifacts.store.windows import seen_windows, window_arrays
from artifacts.store.write import save, update

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

_OF_OTHERS = ("decode", "kv_cache")
# Fields that figures of an artifact depend on.
_MEASURED = ("model", "patterns", "prefill", "decode", "kv_cache", "sidecar")
# Prefixes of array names by section; arrays without one of these prefixes belong to prefill.
_ARRAYS = {"decode": ("similarity.",), "kv_cache": ("kv_cache.", "imported.full_attention")}
# The name of a model is only a label: a different name is not a different model.
_NAMES = {"name", "revision"}


def section_of(array: str) -> str:
    """Section of a sidecar array, from its name: decode, kv_cache or prefill."""
    return next(
        (section for section, begins in _ARRAYS.items() if array.startswith(begins)), "prefill"
    )


def save_searched(
    artifact: Artifact, path: str | os.PathLike[str], arrays: Mapping[str, Array]
) -> Artifact:
    """Write a search result to `path` and keep the other sections of an artifact for this model.

    The arrays of these sections are kept, and so are the text windows that their searches have
    seen. Evidence is dropped: it was measured with the patterns that are replaced. A file that is
    not a complete artifact, is for another model, or for one whose weights have no hash, is
    replaced entirely.

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
        # There is no section to keep, or the new artifact is invalid, which save() reports.
        return save(artifact, path, arrays)


def _with_sections(
    artifact: Artifact, arrays: Mapping[str, Array], old: Artifact, old_arrays: Mapping[str, Array]
) -> tuple[Artifact, Mapping[str, Array]]:
    # Weights without a hash may be any.
    known = artifact.model.weights_sha256 is not None
    if not known or _identity(old.model) != _identity(artifact.model):
        return artifact, arrays
    other_sections = {
        name: getattr(old, name) for name in _OF_OTHERS if getattr(artifact, name) is None
    }
    other_sections = {
        name: section for name, section in other_sections.items() if section is not None
    }
    theirs = {
        name: array for name, array in old_arrays.items() if section_of(name) in other_sections
    }
    merged = artifact.model_copy(update=other_sections)
    # The list does not record which search saw a window. While a section of another command is
    # kept, all windows count.
    return with_seen(
        merged, {**theirs, **arrays}, seen_windows(old_arrays) if other_sections else ()
    )


def put_section(
    imported: Artifact, arrays: Mapping[str, Array], old: Artifact, old_arrays: Mapping[str, Array]
) -> tuple[Artifact, dict[str, Array]]:
    """Return `old` with the imported section and its arrays.

    If the patterns change, the search and the evidence of the old patterns are dropped.
    """
    section = "prefill" if imported.kv_cache is None else "kv_cache"
    fields = {
        "prefill": ("search", "patterns", "prefill", "evidence"),
        "kv_cache": ("kv_cache",),
    }[section]
    changes = {name: getattr(imported, name) for name in fields}
    other_arrays = {
        name: array for name, array in old_arrays.items() if section_of(name) != section
    }
    return old.model_copy(update=changes), {**other_arrays, **arrays}


def with_seen(
    artifact: Artifact, arrays: Mapping[str, Array], digests: Iterable[str]
) -> tuple[Artifact, dict[str, Array]]:
    """Add text windows to the seen windows of the artifact; return it with its arrays.

    An artifact without a search lists no windows.
    """
    if artifact.search is None:
        return artifact, dict(arrays)
    windows = {*seen_windows(arrays), *digests}
    calibration = artifact.search.calibration.model_copy(update={"seen_windows": len(windows)})
    search = artifact.search.model_copy(update={"calibration": calibration})
    return artifact.model_copy(update={"search": search}), {**arrays, **window_arrays(windows)}


def check_measured(now: Artifact, measured: Artifact, path: str | os.PathLike[str]) -> None:
    """Check that an artifact still is the one that was measured; evidence may have been added.

    Args:
        now: the artifact in the file.
        measured: the artifact that was in it before the measurement.
        path: the file.

    Raises:
        HeadwiseError: it is another one.
    """
    if now.content_sha256 == measured.content_sha256:
        return
    for name in _MEASURED:
        if getattr(now, name) != getattr(measured, name):
            raise HeadwiseError(
                f"{os.fspath(path)} was replaced during the measurement by another artifact "
                f"(different {name}): nothing was written into it, start again"
            )


def _identity(model: ModelInfo) -> dict[str, object]:
    return model.model_dump(exclude=_NAMES)
