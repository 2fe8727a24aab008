"""Dense attention by our own kernels, from one token to whole prompts, against the reference.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.dense import dense_attention
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
    return sparse_attention(q, k, v, index, sinks=sinks, return_lse=True, backend="reference")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (16, 700), (17, 700), (300, 300)])
def test_dense_attention_is_causal_attention(backend, window, q_len, k_len):
    q, k, v = inputs(q_len, k_len, batch=2)
    for sinks in (None, torch.randn(6)):
        found = dense_attention(q, k, v, window=window, sinks=sinks, backend=backend)
        for actual, wanted in zip(found, expected(q, k, v, window, sinks), strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    out = torch.empty_like(q)
    assert dense_attention(q, k, v, window=window, out=out)[0] is out


@pytest.mark.parametrize("q_len", [1, 9, 40, 500])
@pytest.mark.parametrize("page", [None, 16])
def test_sequences_of_unlike_length(q_len, page):
    lengths = (500, 500 - q_len + 1, max(q_len, 130))
    q, k, v = inputs(q_len, 500, batch=3)
    ragged = Ragged.left_padded(lengths, q_len, 500)
    table = None
    cache_k, cache_v = k, v
    if page is not None:
        sequences = [[x[s, :, 500 - n :] for s, n in enumerate(lengths)] for x in (k, v)]
        (cache_k, table), (cache_v, _) = (paged(x, page) for x in sequences)
        ragged = replace(ragged, k_starts=(0, 0, 0))
    found, lse = dense_attention(q, cache_k, cache_v, ragged=ragged, block_table=table, window=70)
    for s, n in enumerate(lengths):
        own = slice(q_len - min(n, q_len), q_len)
        alone = (q[[s], :, own], k[[s], :, 500 - n :], v[[s], :, 500 - n :])
        wanted, wanted_lse = expected(*alone, window=70)
        torch.testing.assert_close(found[[s], :, own], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[[s], :, own], wanted_lse, rtol=1e-5, atol=1e-5)
        assert (found[s, :, : own.start] == 0).all()


def test_the_index_of_a_shape_is_made_once():
    device = torch.device("cpu")
    ragged = [Ragged.left_padded((70, 30), 70, 70) for _ in range(2)]
    first, again = (dense_index(2, 3, 70, 70, device, ragged=each) for each in ragged)
    assert first is again and first is not dense_index(2, 3, 70, 70, device)
    first.validate()


@pytest.mark.parametrize("q_len", [1, 50, 64])
def test_a_call_that_is_all_tail_estimates_nothing(q_len, monkeypatch):
    patterns = [make("vertical_slash", vertical=70, slash=64), make("block_sparse", blocks=2)]
    plan = LayerPlan(patterns, 1, dense_tail=64)
    monkeypatch.setattr("kernels.patterns.vertical_slash.estimate", None)
    index = plan.build(torch.randn(1, 2, q_len, 32), torch.randn(1, 1, 1000, 32))
    assert index.to_mask().sum() == 2 * sum(range(1000 - q_len + 1, 1001))
