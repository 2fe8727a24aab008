"""How far a model's heads have moved away from patterns that were found on another: the patterns' errors on it.

Shapes: L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from artifacts import Artifact, HeadwiseError
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import Fidelity, layer_fidelity
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.prompts.prompt import Prompt
from runtime.plans import kernel_patterns, layer_plan
from search.explaining.findings import DRIFT_FLOOR

if TYPE_CHECKING:
    from artifacts.sidecar import Array

_MEASURES = ("error", "recall", "density")
Look = Callable[[int, LayerInputs, np.ndarray], None]
"""Takes a prompt's place, a layer's inputs, and its heads' drift (H)."""


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
        return _grown(self.here.error, self.before)

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
    look: Look | None = None,
) -> Drift:
    """Run the artifact's patterns beside dense attention on every prompt, one dense pass each.

    Args:
        loaded: the model that they may be served to; the artifact was searched on one of the same shape.
        artifact, arrays: with `chosen.error`, what the search measured.
        prompts: those of the search, so that what differs is the model.
        ledger: keeps each layer as it is finished; those that it has are not measured again. Its settings are all that
            the layers depend on.
        backend: as for kernels.attention.sparse_attention.
        look: is shown each layer as it is measured, and the drift of its heads on the prompts so far.

    Raises:
        HeadwiseError: a layer that was searched slides in this model, or does not attend.
    """
    patterns, before = kernel_patterns(artifact, arrays), np.asarray(arrays["chosen.error"])
    served = [layer for layer, row in enumerate(artifact.prefill.layers) if row is not None]

    def unit(sample: int, layer: int) -> Unit:
        return ledger.unit(f"drift {sample}.{layer}")

    with phase("drift", len(served) * len(prompts), "layers") as shown:
        for sample, prompt in enumerate(prompts):
            left = [layer for layer in served if unit(sample, layer) not in ledger]
            shown.skip(len(served) - len(left))

            def visit(inputs: LayerInputs, sample: int = sample, left: Sequence[int] = left) -> None:
                if inputs.layer not in left:
                    return
                if inputs.sliding_window is not None:
                    raise HeadwiseError(
                        f"layer {inputs.layer} has patterns in the artifact, but slides over {inputs.sliding_window} "
                        f"tokens in {loaded.name}"
                    )
                plan = layer_plan(artifact, patterns, inputs.layer, slice(None), inputs.k.shape[1])
                assert plan is not None, "only layers that have a row are left to be measured"
                found = layer_fidelity(inputs, plan, backend=backend)
                values = {name: getattr(found, name).tolist() for name in _MEASURES}
                # A layer is finished when it has been looked at.
                if look is not None:
                    former = [ledger.get(unit(one, inputs.layer))["error"] for one in range(sample)]
                    error = np.mean([*former, found.error], axis=0)
                    look(sample, inputs, _grown(error, before[inputs.layer]))
                ledger.put(unit(sample, inputs.layer), values)
                shown.update()

            if left:
                capture(loaded.model, torch.tensor([prompt.input_ids], device=loaded.model.device), visit)
    tables = {name: np.full_like(before, np.nan) for name in _MEASURES}
    for layer in served:
        found = [ledger.get(unit(sample, layer)) for sample in range(len(prompts))]
        if found[0] is None:
            raise HeadwiseError(f"layer {layer} has patterns in the artifact, but no attention in {loaded.name}")
        for name, table in tables.items():
            table[layer] = np.mean([values[name] for values in found], axis=0)
    return Drift(before=before, here=Fidelity(**tables))


def _grown(error: np.ndarray, before: np.ndarray) -> np.ndarray:
    grown: np.ndarray = (error - before) / np.maximum(before, DRIFT_FLOOR)
    return grown.astype(np.float32)
