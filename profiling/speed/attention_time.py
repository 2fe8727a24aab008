"""Calls of one layer's attention, by its patterns and dense, ready to be timed on the inputs of a real prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan
from profiling.inside.capture import LayerInputs


def by_plan(inputs: LayerInputs, plan: LayerPlan, backend: str) -> Callable[[], Tensor]:
    """A layer's attention by its patterns, index build included, ready to be timed."""
    q, k, v = inputs.q, inputs.k, inputs.v

    def run() -> Tensor:
        index = plan.build(q, k, scale=inputs.scale)
        out: Tensor = sparse_attention(q, k, v, index, scale=inputs.scale, softcap=inputs.softcap, backend=backend)
        return out

    return run


def by_sdpa(inputs: LayerInputs) -> Callable[[], Tensor]:
    """A layer's dense attention by torch, ready to be timed; without its soft-cap."""

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, is_causal=True, scale=inputs.scale, enable_gqa=True
        )

    return run
