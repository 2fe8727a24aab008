"""Changes a section of an artifact, and writes down what was looked at, so that no other command reports on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts import Artifact, HeadwiseError, ModelInfo, update, window_arrays
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
    """Change the artifact in `file`, as it is by now, add the arrays that were found, and write both to `out`.

    Raises:
        HeadwiseError: the artifact is by now of another model than the one that was measured.
    """

    def changed(now: Artifact, arrays: Mapping[str, Array]) -> tuple[Artifact, dict[str, Array]]:
        # Measuring took a while, and other commands write into the same file.
        if now.model != model:
            raise HeadwiseError(f"{file}: was replaced meanwhile by an artifact of another model: start again")
        made, every = change(now), {**arrays, **found}
        if made.search is None:
            return made, every
        windows = sorted({*Seen.by([arrays]).digests, *seen.digests})
        calibration = made.search.calibration.model_copy(update={"seen_windows": len(windows)})
        search = made.search.model_copy(update={"calibration": calibration})
        return made.model_copy(update={"search": search}), {**every, **window_arrays(windows)}

    return update(file, changed, out=out)
