"""Sizes at which one pattern for all heads costs as much as an artifact, on a real prompt.

Shapes: S prompt length, H query heads, n tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from artifacts import Artifact, HeadwiseError
from kernels.index import TILE, SparseIndex, first_dense, num_tiles, with_dense_tail
from kernels.patterns import KINDS, AShape, Inputs, LayerPlan, Pattern, SkipSoftmax, make
from profiling.inside.capture import LayerInputs, capture
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import make_prompts
from runtime.layers import make_plans

# Prompts that sizes are fitted on: of no evaluation's seed.
CALIBRATION_TASK = "passkey"
CALIBRATION_SEED = 7_777_777
_CHOOSING = ("vertical_slash", "block_sparse")
# A threshold falls to 1 / e in so many steps, and ten times at most.
_STEPS = 50


@dataclass(frozen=True)
class Sizes:
    """A line of patterns: n gives the sizes; larger n never costs less."""

    kind: str
    at: Callable[[int], Mapping[str, int | float]]


SIZES: dict[str, Sizes] = {
    # 1,024 sinks and 4,096 tokens of window, as MInference's budget has it.
    "a_shape": Sizes("a_shape", lambda n: {"sink": n, "window": 4 * n}),
    # 1,000 columns and 6,096 diagonals, MInference's most frequent choice.
    "vertical_slash": Sizes("vertical_slash", lambda n: {"vertical": n, "slash": 6 * n}),
    "vertical": Sizes("vertical_slash", lambda n: {"vertical": n, "slash": 1}),
    "slash": Sizes("vertical_slash", lambda n: {"vertical": 1, "slash": n}),
    "block_sparse": Sizes("block_sparse", lambda n: {"blocks": n}),
    # The threshold, which PatternCosts.fit makes a share of the length.
    "skip_softmax": Sizes("skip_softmax", lambda n: {"scale_factor": math.exp(-n / _STEPS)}),
}


class PatternCosts:
    """Costs of patterns of any sizes in every layer, from one dense pass over a prompt.

    Of each layer only the estimates and gaps that its patterns choose by are kept, no queries and
    no keys.
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
        self._gaps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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

        ids = torch.tensor([prompt.input_ids], device=loaded.model.device, dtype=torch.long)
        self._capture = partial(capture, loaded.model, ids)
        self._capture(visit)

    def _tile_gaps(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Gaps by layer. They take a pass and minutes at long lengths, so only where needed."""

        def visit(inputs: LayerInputs) -> None:
            if inputs.layer in self._own:
                self._gaps[inputs.layer] = tile_gaps(inputs)

        if not self._gaps:
            self._capture(visit)
        return self._gaps

    @property
    def target(self) -> float:
        """The artifact's own density: mean over the heads that have a pattern."""
        return self.own(dense_tail=self._tail)

    def own(self, *, dense_tail: int) -> float:
        """The density of the artifact's patterns with so many of the last queries dense."""
        indices = [with_dense_tail(index, dense_tail) for index in self._own.values()]
        densities = [density for index in indices for density in index.density()[0].tolist()]
        return sum(densities) / len(densities)

    def density(self, pattern: Pattern, *, dense_tail: int) -> float:
        """Compute the mean density where every head has this pattern.

        Of skip-softmax it is the fraction of tiles that are not skipped.
        """
        if isinstance(pattern, SkipSoftmax):
            dense = first_dense(dense_tail, self.length)
            bound = pattern.bound(self.length)
            kept = [
                float(((gaps >= bound) | (rows >= dense)).float().mean())
                for gaps, rows in self._tile_gaps().values()
            ]
            return sum(kept) / len(kept)
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
        self, name: str, *, dense_tail: int, target: float | None = None
    ) -> tuple[dict[str, Any], float]:
        """Find the largest sizes of SIZES[name] that cost no more than `target`, the tail included.

        The target is the artifact's own density if None. The least sizes there are where even these
        cost more. Returns the pattern's fields with its kind, and its density.
        """
        line = SIZES[name]
        if target is None:
            target = self.target

        def fields(n: int) -> dict[str, Any]:
            sizes = dict(line.at(n))
            if "scale_factor" in sizes:
                sizes["scale_factor"] = round(sizes["scale_factor"] * self.length, 4)
            return {"kind": line.kind, **sizes}

        cost = partial(self.density, dense_tail=dense_tail)
        low = 1
        if name == "skip_softmax":
            high = 10 * _STEPS
        elif name == "block_sparse":
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


def tile_gaps(inputs: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute of every causal tile the gap to its anchor (SparseIndex.skip).

    Returns the gaps (H, n) fp32 and the row of each tile (n,).

    A threshold with the log b skips the tiles whose gap is below b. Own tiles and key tile 0 have
    +inf.
    """
    heads, length = inputs.q.shape[1:3]
    group = heads // inputs.k.shape[1]
    rows = num_tiles(length)
    gaps = torch.full((heads, rows, rows), torch.inf, dtype=torch.float32)
    for head in range(heads):
        q = inputs.q[0, head].float()
        k = inputs.k[0, head // group].float()
        for row in range(2, rows):
            first = row * TILE
            last = min((row + 1) * TILE, length)
            logits = q[first:last] @ k[:last].T * inputs.scale
            if inputs.softcap is not None:
                logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
            logits[:, first:].masked_fill_(
                torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).triu(1),
                -torch.inf,
            )
            best = logits[:, :first].unflatten(1, (row, TILE)).amax(-1)
            anchor = torch.maximum(best[:, 0], logits[:, first:].amax(-1))
            gaps[head, row, 1:row] = (best[:, 1:] - anchor[:, None]).amax(0).cpu()
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    return gaps[:, causal], torch.arange(rows)[:, None].expand(-1, rows)[causal]


def _largest(kind: str, length: int) -> Pattern:
    if kind == "block_sparse":
        return make(kind, blocks=num_tiles(length))
    return make(kind, vertical=length, slash=length)


def _a_shape_density(pattern: AShape, length: int, dense_tail: int) -> float:
    # What it computes follows from shapes and sizes, whatever q and k hold.
    tensor = torch.zeros(1, 1, length, 1, dtype=torch.float32)
    index = LayerPlan([pattern], 1, dense_tail=dense_tail).build(tensor, tensor)
    return float(index.density())
