"""Changes a section of an artifact that a command has found something for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts import Artifact, HeadwiseError, ModelInfo, update
from artifacts.sections import with_seen
from profiling.prompts.held_out import Seen

if TYPE_CHECKING:
    from artifacts.sidecar import Array


def amend(
    file: Path,
    out: Path,
    model: ModelInfo,
    change: Callable[[Artifact], Artifact],
    found: Mapping[str, Array],
    seen: Seen,
) -> Artifact:
    """Change the artifact in `file`, as it is by now, add what was found and looked at, and write it to `out`.

    Raises:
        HeadwiseError: the artifact is by now of another model than the one that was measured.
    """

    def changed(now: Artifact, arrays: Mapping[str, Array]) -> tuple[Artifact, dict[str, Array]]:
        # Measuring took a while, and other commands write into the same file.
        if now.model != model:
            raise HeadwiseError(f"{file}: was replaced meanwhile by an artifact of another model: start again")
        return with_seen(change(now), {**arrays, **found}, seen.digests)

    return update(file, changed, out=out)
