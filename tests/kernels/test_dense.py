"""Dense attention by our own kernels, from one token to whole prompts, against torch's with a mask.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.dense import dense_attention
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged
from tests.kernels.triton_inputs import paged


def inputs(q_len: int, k_len: int, batch: int = 1, heads: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(q_len + k_len)
    q = torch.randn(batch, heads, q_len, 32)
    k, v = (torch.randn(batch, heads // 3, k_len, 32) for _ in range(2))
    return q, k, v


def expected(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q_len, k_len = q.shape[2], k.shape[2]
    keys, values = (x.double().repeat_interleave(3, dim=1) for x in (k, v))
    logits = q.double() @ keys.transpose(2, 3) * 32**-0.5
    distance = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
    logits = logits.masked_fill((distance < 0) | (distance >= (window or k_len)), float("-inf"))
    if sinks is not None:
        logits = torch.cat(
            [sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1), logits], dim=-1
        )
    return (logits.softmax(-1)[..., -k_len:] @ values).float(), logits.logsumexp(-1).float()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    ("q_len", "k_len"),
    [(1, 1), (1, 700), (16, 16), (16, 700), (17, 700), (64, 2100), (100, 700), (300, 300)],
)
def test_dense_attention_is_causal_attention(
    backend: str, window: int | None, q_len: int, k_len: int
) -> None:
    q, k, v = inputs(q_len, k_len, batch=2)
    for sinks in (None, torch.randn(6)):
        found = dense_attention(q, k, v, window=window, sinks=sinks, backend=backend)
        for actual, wanted in zip(found, expected(q, k, v, window, sinks), strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    out = torch.empty_like(q)
    assert dense_attention(q, k, v, window=window, out=out)[0] is out


@pytest.mark.parametrize("q_len", [1, 9, 40, 500])
@pytest.mark.parametrize("page", [None, 16])
def test_sequences_of_unlike_length(q_len: int, page: int | None) -> None:
    lengths = (500, 500 - q_len + 1, max(q_len, 130))
    q, k, v = inputs(q_len, 500, batch=3)
    ragged = Ragged.left_padded(lengths, q_len, 500)
    table = None
    cache_k, cache_v = k, v
    if page is not None:
        sequences = [[x[s, :, 500 - n :] for s, n in enumerate(lengths)] for x in (k, v)]
        (cache_k, table), (cache_v, _) = (paged(x, page) for x in sequences)
        ragged = Ragged(
            rows=ragged.rows,
            q_starts=ragged.q_starts,
            q_lens=ragged.q_lens,
            k_starts=(0, 0, 0),
            k_lens=ragged.k_lens,
        )
    found, lse = dense_attention(q, cache_k, cache_v, ragged=ragged, block_table=table, window=70)
    for s, n in enumerate(lengths):
        own = min(n, q_len)
        alone = (
            q[s : s + 1, :, q_len - own :],
            k[s : s + 1, :, 500 - n :],
            v[s : s + 1, :, 500 - n :],
        )
        wanted, wanted_lse = expected(*alone, window=70)
        torch.testing.assert_close(found[s : s + 1, :, q_len - own :], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            lse[s : s + 1, :, q_len - own :], wanted_lse, rtol=1e-5, atol=1e-5
        )
        assert (found[s, :, : q_len - own] == 0).all()


def test_the_index_of_a_shape_is_made_once() -> None:
    device = torch.device("cpu")
    ragged = [Ragged.left_padded((70, 30), 70, 70) for _ in range(2)]
    first, again = (dense_index(2, 3, 70, 70, device, ragged=each) for each in ragged)
    assert first is again and first is not dense_index(2, 3, 70, 70, device)
    first.validate()


@pytest.mark.parametrize("q_len", [1, 50, 64, 100])
def test_a_call_that_is_all_tail_estimates_nothing(
    q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LayerPlan(
        [make("vertical_slash", vertical=70, slash=64), make("block_sparse", blocks=2)],
        1,
        dense_tail=64,
    )
    estimated = []
    monkeypatch.setattr(
        "kernels.patterns.vertical_slash.estimate",
        lambda *args, **how: estimated.append(1) or (None, None),
    )
    monkeypatch.setattr("kernels.patterns.vertical_slash.select", lambda *args, **how: None)
    monkeypatch.setattr(
        "kernels.patterns.cat_heads", lambda *args: dense_index(1, 2, q_len, 1000, args[1].device)
    )
    index = plan.build(torch.randn(1, 2, q_len, 32), torch.randn(1, 1, 1000, 32))
    first = (1000 - q_len) // 64
    assert bool(estimated) == (first < (1000 - 64) // 64)
    assert index.to_mask().sum() == 2 * sum(range(1000 - q_len + 1, 1001))


def test_what_is_wrong_is_said() -> None:
    q, k, v = inputs(40, 70)
    with pytest.raises(
        ValueError, match="a block table needs the lengths of its sequences: give a Ragged"
    ):
        dense_attention(q, k, v, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(
        ValueError, match="query length must be between 1 and key length 40, got 70"
    ):
        dense_attention(*inputs(70, 40))
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        dense_attention(q, k, v, window=0)
