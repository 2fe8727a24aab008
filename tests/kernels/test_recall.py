"""The estimate of recall against attention weights in fp32, and heads that are made dense."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.attention.recall import dense_where, estimate_recall
from kernels.index import SparseIndex
from kernels.patterns import LayerPlan, Pattern
from kernels.ragged import Ragged


def inputs(q_len: int, k_len: int, heads: int = 14, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(q_len + k_len)
    q = torch.randn(batch, heads, q_len, 32) * 2
    k, v = torch.randn(batch, heads // 2, k_len, 32), torch.randn(batch, heads // 2, k_len, 48)
    return q, k, v


def recall_of_every_query(q: Tensor, k: Tensor, index: SparseIndex, softcap: float | None = None) -> Tensor:
    """(B, H, Q): the share of each query's attention on the keys of the index, by full weights."""
    logits = q.double() @ k.double().repeat_interleave(2, dim=1).transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    q_len, k_len = logits.shape[2:]
    distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
    unseen = (distance < 0) | (distance >= (index.window or k_len))
    weights = logits.masked_fill(unseen, float("-inf")).softmax(-1)
    return (weights * index.to_mask()).sum(-1)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (1, 300), (63, 63), (64, 640), (300, 300), (500, 701)])
@pytest.mark.parametrize("more", [{}, {"window": 200}, {"softcap": 3.0}])
def test_estimate_is_the_recall_of_the_last_queries(
    backend: str, q_len: int, k_len: int, more: dict[str, float], layer_of_unlike_heads: tuple[Pattern, ...]
) -> None:
    q, k, v = inputs(q_len, k_len, batch=2)
    softcap = more.get("softcap")
    patterns = [pattern for pattern in layer_of_unlike_heads if pattern.kind != "tri_shape"]
    plan = LayerPlan([*patterns, patterns[0]], 7)
    index = plan.build(q, k, window=more.get("window"))  # type: ignore[arg-type]
    found = estimate_recall(q, k, v, index, softcap=softcap, backend=backend)
    expected = recall_of_every_query(q, k, index, softcap)[..., -64:].mean(-1)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)


def test_the_dense_tail_does_not_flatter(layer_of_unlike_heads: tuple[Pattern, ...]) -> None:
    q, k, v = inputs(700, 700)
    bare, tailed = (LayerPlan(layer_of_unlike_heads, 7, dense_tail=tail).build(q, k) for tail in (0, 64))
    found = [estimate_recall(q, k, v, index, backend="reference") for index in (bare, tailed)]
    assert torch.equal(*found) and float(found[0].min()) < 0.8


def test_estimate_is_near_the_recall_of_all_queries(layer_of_unlike_heads: tuple[Pattern, ...]) -> None:
    """What it is for: patterns that keep little are told from those that keep much."""
    q, k, v = inputs(1500, 1500)
    k[:, :, :4] += 2 * q.mean(2)[:, ::2, None]
    index = LayerPlan(layer_of_unlike_heads, 7).build(q, k)
    found = estimate_recall(q, k, v, index, last=256)[0]
    true = recall_of_every_query(q, k, index)[0, :, 700:].mean(-1).float()
    assert float((found - true).abs().max()) < 0.2
    assert float(torch.corrcoef(torch.stack([found, true]))[0, 1]) > 0.95


def test_ragged_sequences_each_have_their_own(layer_of_unlike_heads: tuple[Pattern, ...]) -> None:
    q, k, v = inputs(400, 500, batch=3)
    lengths = (500, 20, 333)
    plan, ragged = LayerPlan(layer_of_unlike_heads, 7), Ragged.left_padded(lengths, 400, 500)
    found = estimate_recall(q, k, v, plan.build(q, k, ragged=ragged), backend="cpu")
    assert found.shape == (3, 14)
    for s, length in enumerate(lengths):
        alone = q[s : s + 1, :, -min(length, 400) :], k[s : s + 1, :, -length:], v[s : s + 1, :, -length:]
        expected = estimate_recall(*alone, plan.build(*alone[:2]), backend="cpu")
        torch.testing.assert_close(found[s : s + 1], expected)


def test_nan_is_nan_where_it_is(layer_of_unlike_heads: tuple[Pattern, ...]) -> None:
    q, k, v = inputs(300, 300, batch=2)
    index = LayerPlan(layer_of_unlike_heads, 7).build(q, k)
    q[0, 3, 299] = float("nan")
    found = estimate_recall(q, k, v, index)
    assert found[0, 3].isnan() and found.isnan().sum() == 1


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("lengths", [None, (300, 130)])
def test_heads_made_dense_see_everything_and_no_other_changes(
    backend: str, lengths: tuple[int, ...] | None, layer_of_unlike_heads: tuple[Pattern, ...]
) -> None:
    q, k, v = inputs(300, 300, batch=2)
    ragged = None if lengths is None else Ragged.left_padded(lengths, 300, 300)
    index = LayerPlan(layer_of_unlike_heads, 7).build(q, k, ragged=ragged)
    heads = torch.zeros(2, 14, dtype=torch.bool)
    assert dense_where(index, heads) is index
    heads[0, [2, 12]] = heads[1, 5] = True
    mixed = dense_where(index, heads)
    mixed.validate()
    everything = dense_where(index, torch.ones_like(heads))
    before, after, dense = (sparse_attention(q, k, v, each, backend=backend) for each in (index, mixed, everything))
    assert torch.equal(after[~heads], before[~heads])
    torch.testing.assert_close(after[heads], dense[heads])
    torch.testing.assert_close(estimate_recall(q, k, v, mixed)[heads], torch.ones(3))


def test_no_queries_is_refused(layer_of_unlike_heads: tuple[Pattern, ...]) -> None:
    q, k, v = inputs(70, 70)
    index = LayerPlan(layer_of_unlike_heads, 7).build(q, k)
    with pytest.raises(ValueError, match="last must be at least 1, got 0"):
        estimate_recall(q, k, v, index, last=0)
