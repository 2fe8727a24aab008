"""How far a model's heads have moved away from patterns that were found on another: the patterns' errors on it.

Shapes: L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact
from profiling.inside.head_fidelity import Fidelity, fidelity
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.prompts.prompt import Prompt
from search.common.measures import DRIFT_FLOOR, MEASURES

if TYPE_CHECKING:
    from artifacts.sidecar import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Drift:
    """before: (L, H) errors that the search measured on its model; here: what the same patterns do on this one.

    NaN in layers left alone.
    """

    before: np.ndarray
    here: Fidelity

    @property
    def by_head(self) -> np.ndarray:
        """(L, H) growth of a head's error by what it was, 0.5 for half as much again, counted from DRIFT_FLOOR up."""
        grown: np.ndarray = (self.here.error - self.before) / np.maximum(self.before, DRIFT_FLOOR)
        return grown.astype(np.float32)

    def moved(self, most: float) -> np.ndarray:
        """(L, H) whether the error has grown by more than `most` of what it was."""
        return np.nan_to_num(self.by_head, nan=-1.0) > most


def measure_drift(
    loaded: LoadedModel,
    artifact: Artifact,
    arrays: Mapping[str, Array],
    prompts: Sequence[Prompt],
    ledger: Ledger,
    *,
    backend: str = "auto",
) -> Drift:
    """Run the artifact's patterns beside dense attention on every prompt, one dense pass each.

    Args:
        loaded: the model that they may be served to; the artifact was searched on one of the same shape.
        artifact, arrays: with `chosen.error`, what the search measured.
        prompts: those of the search, so that what differs is the model.
        ledger: keeps each prompt's figures. Its settings are all that they depend on.
        backend: as for kernels.attention.sparse_attention.
    """
    found = []
    with phase("drift", len(prompts), "prompts") as shown:
        for sample, prompt in enumerate(prompts):
            measure = partial(_measured, loaded, artifact, arrays, prompt, backend)
            found.append(ledger.once(ledger.unit(f"drift {sample}"), measure))
            shown.update()
    means = {name: np.mean([one[name] for one in found], axis=0) for name in MEASURES}
    return Drift(before=np.asarray(arrays["chosen.error"]), here=Fidelity(**means))


def _measured(
    loaded: LoadedModel, artifact: Artifact, arrays: Mapping[str, Array], prompt: Prompt, backend: str
) -> dict[str, Any]:
    return dict(vars(fidelity(loaded.model, artifact, prompt, arrays, backend=backend)))
