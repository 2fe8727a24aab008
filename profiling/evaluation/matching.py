"""Sizes at which one pattern for all heads costs as much as an artifact, on a real prompt.

Shapes: S prompt length, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from artifacts import Artifact, HeadwiseError
from kernels.index import SparseIndex, num_tiles, with_dense_tail
from kernels.patterns import KINDS, AShape, Inputs, LayerPlan, Pattern, make
from profiling.inside.capture import LayerInputs, capture
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Task, make_prompts
from runtime.devices import execution_device
from runtime.layers import make_plans

# Prompts that sizes are fitted on: of no evaluation's seed.
CALIBRATION_TASK = Task("passkey")
CALIBRATION_SEED = 7_777_777
_CHOOSING = ("vertical_slash", "block_sparse")
# Sizes along which a pattern grows: larger n never costs less.
Sizes = Callable[[int], Mapping[str, int | float]]


class PatternCosts:
    """Costs of patterns of any sizes in every layer, from one dense pass over a prompt.

    Of each layer only the estimates that its patterns choose by are kept, no queries and no keys.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        artifact: Artifact,
        length: int,
    ) -> None:
        """Measure an artifact that has patterns, at `length` tokens.

        Raises:
            HeadwiseError: it has none, or no prompt of that length can be made.
        """
        if not any(artifact.prefill.layers):
            raise HeadwiseError(
                "the artifact has no patterns: there is no density to compare methods at"
            )
        self.length = length
        self.heads = artifact.model.num_heads
        self._prepared: dict[int, dict[str, Callable[[Sequence[Any]], SparseIndex]]] = {}
        self._own: dict[int, SparseIndex] = {}
        self._tail = artifact.prefill.dense_tail
        without = artifact.model_copy(
            update={"prefill": artifact.prefill.model_copy(update={"dense_tail": 0})}
        )
        plans = make_plans(without)
        prompt = make_prompts(
            CALIBRATION_TASK, loaded.tokenizer, length=length, samples=1, seed=CALIBRATION_SEED
        )[0]

        def visit(inputs: LayerInputs) -> None:
            if (plan := plans.get(inputs.layer)) is None:
                return
            index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
            self._own[inputs.layer] = index
            heads = range(inputs.q.shape[1])
            self._prepared[inputs.layer] = {
                kind: KINDS[kind].prepare(
                    [_largest(kind, length) for _ in heads],
                    Inputs(heads, inputs.q, inputs.k, inputs.scale),
                )
                for kind in _CHOOSING
            }

        ids = torch.tensor(
            [prompt.input_ids], device=execution_device(loaded.model), dtype=torch.long
        )
        capture(loaded.model, ids, visit)

    @property
    def target(self) -> float:
        """The artifact's own density: mean over the heads that have a pattern."""
        return self.own(dense_tail=self._tail)

    def own(self, *, dense_tail: int) -> float:
        """Density of the artifact's patterns with the last `dense_tail` queries dense."""
        indices = [with_dense_tail(index, dense_tail) for index in self._own.values()]
        densities = [density for index in indices for density in index.density()[0].tolist()]
        return sum(densities) / len(densities)

    def density(self, pattern: Pattern, *, dense_tail: int) -> float:
        """Compute the mean density where every head has this pattern."""
        if isinstance(pattern, AShape):
            return _a_shape_density(pattern, self.length, dense_tail)
        means = [
            float(
                with_dense_tail(kinds[pattern.kind]([pattern] * self.heads), dense_tail)
                .density()
                .mean()
            )
            for kinds in self._prepared.values()
        ]
        return sum(means) / len(means)

    def fit(
        self, kind: str, sizes: Sizes, *, dense_tail: int, target: float | None = None
    ) -> tuple[dict[str, Any], float]:
        """Find the largest sizes that cost no more than `target`, the tail included.

        The target is the artifact's own density if None. The least sizes there are where even these
        cost more. Returns the pattern's fields with its kind, and its density.
        """
        if target is None:
            target = self.target

        def fields(n: int) -> dict[str, Any]:
            return {"kind": kind, **sizes(n)}

        cost = partial(self.density, dense_tail=dense_tail)
        low = 1
        if kind == "block_sparse":
            # Its n counts tiles.
            high = num_tiles(self.length)
        else:
            high = self.length
        while low < high:
            middle = (low + high + 1) // 2
            if cost(make(**fields(middle))) <= target:
                low = middle
            else:
                high = middle - 1
        return fields(low), cost(make(**fields(low)))


def _largest(kind: str, length: int) -> Pattern:
    if kind == "block_sparse":
        return make(kind, blocks=num_tiles(length))
    return make(kind, vertical=length, slash=length)


def _a_shape_density(pattern: AShape, length: int, dense_tail: int) -> float:
    # The computed tiles depend on shapes and sizes only, not on the values of q and k.
    tensor = torch.zeros(1, 1, length, 1, dtype=torch.float32, device="cpu")
    index = LayerPlan([pattern], 1, dense_tail=dense_tail).build(tensor, tensor)
    return float(index.density())
