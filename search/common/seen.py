"""Writes down in an artifact what a command has looked at, so that no other one reports on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from artifacts import Artifact, window_arrays
from profiling.prompts.held_out import Seen

if TYPE_CHECKING:
    from artifacts.sidecar import Array


def with_seen(artifact: Artifact, arrays: Mapping[str, Array], seen: Seen) -> tuple[Artifact, dict[str, Array]]:
    """The artifact and its arrays with these windows besides those that it lists; one without a search lists none."""
    if artifact.search is None:
        return artifact, dict(arrays)
    windows = sorted({*Seen.by([arrays]).digests, *seen.digests})
    calibration = artifact.search.calibration.model_copy(update={"seen_windows": len(windows)})
    search = artifact.search.model_copy(update={"calibration": calibration})
    return artifact.model_copy(update={"search": search}), {**arrays, **window_arrays(windows)}
