"""Skip-softmax: thresholds of sequences and heads; tests/conformance has the definition.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.index import TILE, num_tiles
from kernels.joining import cat_heads
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged


def inputs(length: int, heads: int = 3, kv_heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, H, Q, 32), k and v (1, G, Q, 32): tiles of keys that queries want more or less of."""
    torch.manual_seed(length)
    want = torch.randn(32)
    q = torch.randn(1, heads, length, 32) + want
    strength = torch.randn(1, kv_heads, num_tiles(length), 1)
    strength = strength.repeat_interleave(TILE, 2)[:, :, :length]
    k = 0.5 * torch.randn(1, kv_heads, length, 32) + 2 * strength * want
    return q, k, torch.randn(1, kv_heads, length, 32)


def test_sequences_of_a_batch_have_each_their_own_threshold():
    q, k, v = inputs(700)
    ragged = Ragged.packed([0, 300, 700], [0, 300, 700])
    plan = LayerPlan([make("skip_softmax", scale_factor=20.0)] * 3, 1)
    index = plan.build(q, k, ragged=ragged)
    assert index.skip is not None and index.skip[:, 0].tolist() == pytest.approx(
        [math.log(20 / 300), math.log(20 / 400)]
    )
    skipped = torch.zeros(2, 3, dtype=torch.int32)
    out = sparse_attention(q, k, v, index, skipped=skipped)
    for s, part in enumerate((slice(0, 300), slice(300, 700))):
        own = torch.zeros(1, 3, dtype=torch.int32)
        one = [x[:, :, part] for x in (q, k, v)]
        alone = sparse_attention(*one, plan.build(*one[:2]), skipped=own, backend="reference")
        assert torch.equal(own[0], skipped[s]) and int(own.sum()) > 0
        assert torch.allclose(out[:, :, part], alone, atol=1e-5)


def test_heads_without_a_bound_and_short_prompts_skip_nothing():
    q, k, v = inputs(700)
    skips = LayerPlan([make("skip_softmax", scale_factor=30.0)] * 2, 1).build(q[:, :2], k)
    dense = LayerPlan([make("dense")], 1).build(q[:, :1], k)
    order = [2, 0, 1]
    index = cat_heads([skips, dense], torch.tensor(order), order)
    assert index.skip is not None and index.skip[0, 0] == -math.inf
    skipped = torch.zeros(1, 3, dtype=torch.int32)
    sparse_attention(q, k, v, index, skipped=skipped)
    assert skipped[0, 0] == 0 and bool((skipped[0, 1:] > 0).all())
    short = LayerPlan([make("skip_softmax", scale_factor=700.0)] * 3, 1).build(q, k)
    assert torch.equal(
        sparse_attention(q, k, v, short), sparse_attention(q, k, v, replace(short, skip=None))
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_not_finite_is_never_taken_for_low(backend):
    """A query that is NaN can do without no tile: its row is computed whole."""
    q, k, v = inputs(700)
    index = dense_index(1, 3, 700, 700, q.device)
    index = replace(index, skip=torch.full((1, 3), -3.0))
    before, after = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    sparse_attention(q, k, v, index, backend=backend, skipped=before)
    q[0, 1, 650] = math.nan
    out = sparse_attention(q, k, v, index, backend=backend, skipped=after)
    assert after[0, 0] == before[0, 0] and after[0, 1] < before[0, 1]
    assert bool(out[0, 1, 650].isnan().all()) and not bool(out[0, 1, :640].isnan().any())
