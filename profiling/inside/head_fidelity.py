"""Distance of each head's sparse attention to dense attention on a prompt.

Shapes: L layers, H query heads, S prompt length, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from artifacts import Artifact
from kernels import attention
from kernels.call import AttentionCall
from kernels.index import SparseIndex
from kernels.patterns import LayerPlan
from kernels.patterns.dense import dense_index
from profiling.inside.capture import LayerInputs, capture
from profiling.prompts.prompt import Prompt
from runtime.devices import execution_device
from runtime.layers import make_plans


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Per head, (L, H) fp32, NaN in layers left alone.

    Attributes:
        error: relative L2 distance of the output.
        recall: attention mass kept.
        density: fraction of the causal tiles computed; a tile that skip-softmax skips counts half.
    """

    error: np.ndarray
    recall: np.ndarray
    density: np.ndarray


def fidelity(
    model: Any,
    artifact: Artifact,
    prompt: Prompt,
    *,
    backend: str = "auto",
) -> Fidelity:
    """Measure an artifact's patterns on one dense pass, each layer on dense attention's inputs.

    Args:
        model: the model that the artifact is for.
        artifact: the artifact whose patterns are measured.
        prompt: the prompt of the dense pass.
        backend: as for kernels.attention.sparse_attention.
    """
    plans = make_plans(artifact)
    shape = (artifact.model.num_layers, artifact.model.num_heads)
    measured = Fidelity(
        **{
            name: np.full(shape, np.nan, dtype=np.float32)
            for name in ("error", "recall", "density")
        }
    )

    def visit(inputs: LayerInputs) -> None:
        if (plan := plans.get(inputs.layer)) is None:
            return
        of_layer = layer_fidelity(inputs, plan, backend=backend)
        for name in ("error", "recall", "density"):
            getattr(measured, name)[inputs.layer] = getattr(of_layer, name)

    capture(
        model,
        torch.tensor([prompt.input_ids], device=execution_device(model), dtype=torch.long),
        visit,
    )
    return measured


def layer_fidelity(
    inputs: LayerInputs,
    plan: LayerPlan,
    *,
    dense: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Fidelity:
    """Measure the patterns of one layer, (H,) each.

    Args:
        inputs: what its heads attend with.
        plan: their patterns.
        dense: what dense_of_layer returned for the layer, None to compute it.
        backend: as for kernels.attention.sparse_attention.
    """
    return index_fidelity(
        inputs,
        plan.build(inputs.q, inputs.k, scale=inputs.scale),
        dense=dense,
        backend=backend,
    )


def index_fidelity(
    inputs: LayerInputs,
    index: SparseIndex,
    *,
    dense: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Fidelity:
    """Measure an index of one layer."""
    heads = range(inputs.q.shape[1])
    expected, dense_lse = dense_of_layer(inputs, backend=backend) if dense is None else dense
    skipped = index.diagonals.new_zeros(index.diagonals.shape[:2])
    out, lse = attend(inputs, index, backend, skipped=skipped)
    error = np.empty(len(heads), dtype=np.float32)
    for head in heads:
        # Head by head: the fp32 difference of a whole layer would be the largest tensor.
        exact = expected[0, head].float()
        error[head] = float((out[0, head].float() - exact).norm() / exact.norm().clamp_min(1e-30))
    recall = kept_mass(lse[0], dense_lse[0], inputs.logits.sinks).mean(-1).cpu().numpy()
    density = index.density()[0] - skipped[0].float() / (2 * index.causal_tiles)
    return Fidelity(error=error, recall=recall, density=density.cpu().numpy())


def worked_tiles(inputs: LayerInputs, index: SparseIndex, *, backend: str = "auto") -> Tensor:
    """Count the tiles that each head computes, (1, H) fp64; a skipped one counts half."""
    counted = index.computed_tiles().double()
    if index.skip is None:
        return counted
    skipped = index.diagonals.new_zeros(index.diagonals.shape[:2])
    attend(inputs, index, backend, skipped=skipped)
    return counted - skipped.double() / 2


def dense_of_layer(inputs: LayerInputs, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Attend densely by the serving kernels: output (1, H, S, E), log-sum-exp (1, H, S).

    Learned sinks of the layer are in both.
    """
    heads, length = inputs.q.shape[1:3]
    return attend(
        inputs, dense_index(1, heads, length, inputs.k.shape[2], inputs.q.device), backend
    )


def attend(
    inputs: LayerInputs, index: SparseIndex, backend: str, *, skipped: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend over an index: output (1, H, S, E), log-sum-exp (1, H, S).

    Args:
        inputs: of a layer on a dense pass.
        index: what each head computes.
        backend: as for kernels.attention.sparse_attention.
        skipped: as for kernels.attention.sparse_attention.
    """
    call = AttentionCall(inputs.q, inputs.k, inputs.v, index, logits=inputs.logits, skipped=skipped)
    return attention.attend(call, backend)


def kept_mass(lse: Tensor, dense_lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the fraction of dense attention's mass that a pattern keeps, (H, ..., S).

    Args:
        lse: (H, ..., S) log-sum-exp of the pattern.
        dense_lse: log-sum-exp of dense attention, broadcasts to `lse`.
        sinks: (H,) learned sinks that both log-sum-exps have in them; they are no keys.
    """
    if sinks is not None:
        sink = sinks.float().view(-1, *[1] * (lse.dim() - 1))
        lse, dense_lse = (
            total + torch.log1p(-(sink - total).clamp(max=-1e-6).exp())
            for total in (lse, dense_lse)
        )
    return (lse - dense_lse).exp().clamp(max=1.0)
