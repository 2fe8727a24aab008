"""Gaps of tiles: any threshold skips as many by them as the kernels do."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan, make
from profiling.evaluation.matching import tile_gaps
from profiling.inside.capture import LayerInputs
from tests.kernels.test_skip_softmax import inputs


@pytest.mark.parametrize(("length", "softcap"), [(40, None), (450, None), (700, 15.0)])
def test_a_threshold_skips_what_is_below_it(length: int, softcap: float | None) -> None:
    q, k, v = inputs(length, heads=4, kv_heads=2)
    layer = LayerInputs(
        layer=0, q=q, k=k, v=v, scale=0.2, softcap=softcap, sliding_window=None, sinks=None
    )
    gaps, rows = tile_gaps(layer)
    for factor in (5.0, 30.0, 200.0):
        index = LayerPlan([make("skip_softmax", scale_factor=factor)] * 4, 2, dense_tail=70).build(
            q, k
        )
        skipped = torch.zeros(1, 4, dtype=torch.int32)
        sparse_attention(
            q, k, v, index, scale=0.2, softcap=softcap, backend="reference", skipped=skipped
        )
        bound = math.log(factor / length) if factor < length else -math.inf
        below = (gaps < bound) & (rows < index.first_dense()[0])
        assert below.sum(-1).tolist() == skipped[0].tolist()
        assert gaps.shape[1] == index.causal_tiles
