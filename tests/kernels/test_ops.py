"""Other ops: dense attention, merge_attention, EvictCall and tile skipping.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionCall, attend, sparse_attention
from kernels.decode.dropping import EvictCall
from kernels.dense import dense_attention
from kernels.index import TILE, num_tiles
from kernels.logits import Logits
from kernels.merge import merge_attention
from kernels.native import build
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged
from tests.conformance.tensors import paged


def inputs(q_len: int, k_len: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(q_len + k_len)
    q = torch.randn(batch, 6, q_len, 32)
    k, v = (torch.randn(batch, 2, k_len, 32) for _ in range(2))
    return q, k, v


def expected(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    index = dense_index(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device, window=window)
    return attend(AttentionCall(q, k, v, index, logits=Logits(sinks=sinks)), "reference")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (16, 700), (17, 700), (300, 300)])
def test_dense_attention_equals_causal_attention(backend, window, q_len, k_len):
    q, k, v = inputs(q_len, k_len, batch=2)
    for sinks in (None, torch.randn(6)):
        logits = Logits(window=window, sinks=sinks)
        result = dense_attention(q, k, v, logits=logits, backend=backend)
        for actual, wanted in zip(result, expected(q, k, v, window, sinks), strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    out = torch.empty_like(q)
    assert dense_attention(q, k, v, logits=Logits(window=window), out=out)[0] is out


@pytest.mark.parametrize("q_len", [1, 9, 40, 500])
@pytest.mark.parametrize("page", [None, 16])
def test_dense_attention_of_different_lengths_equals_each_sequence(q_len, page):
    lengths = (500, 500 - q_len + 1, max(q_len, 130))
    q, k, v = inputs(q_len, 500, batch=3)
    ragged = Ragged.left_padded(lengths, q_len, 500)
    table = None
    cache_k, cache_v = k, v
    if page is not None:
        sequences = [[x[s, :, 500 - n :] for s, n in enumerate(lengths)] for x in (k, v)]
        (cache_k, table), (cache_v, _) = (paged(x, page) for x in sequences)
        ragged = replace(ragged, k_starts=(0, 0, 0))
    found, lse = dense_attention(
        q, cache_k, cache_v, logits=Logits(window=70), ragged=ragged, block_table=table
    )
    for s, n in enumerate(lengths):
        own = slice(q_len - min(n, q_len), q_len)
        alone = (q[[s], :, own], k[[s], :, 500 - n :], v[[s], :, 500 - n :])
        wanted, wanted_lse = expected(*alone, window=70)
        torch.testing.assert_close(found[[s], :, own], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[[s], :, own], wanted_lse, rtol=1e-5, atol=1e-5)
        assert (found[s, :, : own.start] == 0).all()


def test_dense_index_of_a_shape_is_built_once():
    device = torch.device("cpu")
    ragged = [Ragged.left_padded((70, 30), 70, 70) for _ in range(2)]
    first, again = (dense_index(2, 3, 70, 70, device, ragged=each) for each in ragged)
    assert first is again and first is not dense_index(2, 3, 70, 70, device)
    first.validate()


@pytest.mark.parametrize("q_len", [1, 50, 64])
def test_call_within_the_dense_tail_skips_the_estimate(q_len, monkeypatch):
    patterns = [make("vertical_slash", vertical=70, slash=64), make("block_sparse", blocks=2)]
    plan = LayerPlan(patterns, 1, dense_tail=64)
    monkeypatch.setattr("kernels.patterns.vertical_slash.EstimateCall", None)
    index = plan.build(torch.randn(1, 2, q_len, 32), torch.randn(1, 1, 1000, 32))
    assert index.to_mask().sum() == 2 * sum(range(1000 - q_len + 1, 1001))


B, H, G, Q, D, E = 2, 6, 3, 5, 16, 24


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("few", [1, 7])
def test_merge_attention_of_two_parts_equals_one_softmax(few, masked, softcap):
    torch.manual_seed(0)
    q = torch.randn(B, H, Q, D)
    k, v = torch.randn(B, G, few + 40, D), torch.randn(B, G, few + 40, E)
    seen = torch.ones(Q, few + 40, dtype=torch.bool)
    if masked:
        # The first query sees none of the few, the second none but those.
        seen[0, :few] = False
        seen[1, few:] = False
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(H // G, 1)) * 0.3
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, float("-inf"))
    values = v.repeat_interleave(H // G, 1)
    lse = logits[..., few:].logsumexp(-1)
    out = (logits[..., few:] - lse[..., None]).exp().nan_to_num() @ values[:, :, few:]
    result = merge_attention(
        *(out, lse, q, k[:, :, :few], v[:, :, :few]),
        logits=Logits(scale=0.3, softcap=softcap),
        seen=seen[:, :few] if masked else None,
    )
    torch.testing.assert_close(result, logits.softmax(-1) @ values)


@pytest.mark.skipif(build.load() is not None, reason="no native code on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_evict_call_native_equals_torch(dtype):
    """The definition of what is dropped is tested by the conformance of policies."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 300, 16).to(dtype)
    scores = torch.rand(2, 3, 300)
    positions = torch.arange(300, dtype=torch.int32).expand(2, 3, -1).contiguous()
    native = (keys, values, scores, positions)
    plain = [x.clone() for x in native]
    for rows in range(300, 100, -1):
        # The second sequence is shorter by 50, and every third time drops none.
        queries = [300, 260] if rows % 2 else None
        counts = [rows, rows - 50 if rows % 3 else 0]
        for held, backend in ((native, "cpu"), (plain, "reference")):
            EvictCall(*held, rows=counts, latest=[260, 220], queries=queries).run(backend)
    for one, other in zip(native, plain, strict=True):
        assert torch.equal(one[:, :, :50], other[:, :, :50])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_evict_call_of_different_lengths_equals_each_sequence(backend):
    torch.manual_seed(1)
    keys, values, scores = torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, 8), torch.rand(3, 2, 20)
    positions = torch.arange(20, dtype=torch.int32).expand(3, 2, -1).contiguous()
    # Of what lies behind a sequence nothing is read.
    scores[0, :, 9:] = -1.0
    rows, latest, queries = [9, 20, 0], [7, 15, 0], [9, 21, 30]
    held = (keys, values, scores, positions)
    together = [x.clone() for x in held]
    EvictCall(*together, rows=rows, latest=latest, queries=queries).run(backend)
    for row in range(3):
        alone = [x[row : row + 1].clone() for x in held]
        if rows[row]:
            EvictCall(
                *alone,
                rows=rows[row : row + 1],
                latest=latest[row : row + 1],
                queries=queries[row : row + 1],
            ).run(backend)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[row : row + 1], other)


def unlike_tiles(length: int, heads: int = 3, kv_heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, H, Q, 32), k and v (1, G, Q, 32): tiles of keys that queries want more or less of."""
    torch.manual_seed(length)
    want = torch.randn(32)
    q = torch.randn(1, heads, length, 32) + want
    strength = torch.randn(1, kv_heads, num_tiles(length), 1)
    strength = strength.repeat_interleave(TILE, 2)[:, :, :length]
    k = 0.5 * torch.randn(1, kv_heads, length, 32) + 2 * strength * want
    return q, k, torch.randn(1, kv_heads, length, 32)


def test_skip_threshold_is_per_sequence():
    q, k, v = unlike_tiles(700)
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
        qkv = [x[:, :, part] for x in (q, k, v)]
        alone = sparse_attention(*qkv, plan.build(*qkv[:2]), skipped=own, backend="reference")
        assert torch.equal(own[0], skipped[s]) and int(own.sum()) > 0
        assert torch.allclose(out[:, :, part], alone, atol=1e-5)


def test_skip_without_bound_or_in_short_prompt_skips_nothing():
    q, k, v = unlike_tiles(700)
    skips = make("skip_softmax", scale_factor=30.0)
    index = LayerPlan([make("dense"), skips, skips], 1).build(q, k)
    assert index.skip is not None and index.skip[0, 0] == -math.inf
    skipped = torch.zeros(1, 3, dtype=torch.int32)
    sparse_attention(q, k, v, index, skipped=skipped)
    assert skipped[0, 0] == 0 and bool((skipped[0, 1:] > 0).all())
    short = LayerPlan([make("skip_softmax", scale_factor=700.0)] * 3, 1).build(q, k)
    assert torch.equal(
        sparse_attention(q, k, v, short), sparse_attention(q, k, v, replace(short, skip=None))
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_skip_never_skips_non_finite_scores(backend):
    """A NaN query skips no tile: its whole row is computed."""
    q, k, v = unlike_tiles(700)
    index = dense_index(1, 3, 700, 700, q.device)
    index = replace(index, skip=torch.full((1, 3), -3.0))
    before, after = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    sparse_attention(q, k, v, index, backend=backend, skipped=before)
    q[0, 1, 650] = math.nan
    out = sparse_attention(q, k, v, index, backend=backend, skipped=after)
    assert after[0, 0] == before[0, 0] and after[0, 1] < before[0, 1]
    assert bool(out[0, 1, 650].isnan().all()) and not bool(out[0, 1, :640].isnan().any())
