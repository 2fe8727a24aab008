"""Chunks of a prompt that see of the past only what a filter layer chose: OmniKV-prefill (OmniKV, appendix D.10).

Shapes: B batch, H query heads, G KV heads, Q tokens of the chunk, K tokens in all, n chosen of the K - Q before it,
D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kernels.decode import MAX_QUERIES, decode_attention
from kernels.dense import dense_attention
from kernels.patterns.choose import best_places
from kernels.ragged import Ragged
from runtime.omnikv.offload import OffloadedTensor
from runtime.sharding import agreed


@dataclass(frozen=True, eq=False)
class Past:
    """What a filter layer chose of the tokens before a chunk.

    tokens (B, n) int64: those of sequence b are the last counts[b] of its row, ascending; what stands before is any.
    firsts: the first real token of each sequence.
    """

    q_len: int
    k_len: int
    tokens: Tensor
    counts: tuple[int, ...]
    firsts: tuple[int, ...]


def gains(ratio: float | None, q_len: int, k_len: int) -> bool:
    """Whether `ratio` tokens of the past for each of the chunk are fewer than all of it."""
    return ratio is not None and ceil(ratio * q_len) < k_len - q_len


def choose_past(
    q: Tensor,
    k: Tensor,
    firsts: Sequence[int],
    starts: Tensor | None,
    *,
    ratio: float,
    window: int,
    scale: float | None,
    softcap: float | None,
    backend: str,
    group: Any = None,
) -> Past:
    """The tokens of the past that the last `window` queries of a chunk, at most 16, attend to most, over all heads.

    q (B, H, Q, D), k (B, G, K, D); sequence b starts at key firsts[b], which `starts` says on the device.
    group: processes that share the layer's heads and choose alike.
    """
    q_len, k_len = q.shape[2], k.shape[2]
    past, most = k_len - q_len, ceil(ratio * q_len)
    queries = q[:, :, -min(window, MAX_QUERIES, q_len) :]
    seen = decode_attention(queries, k, k, starts=starts, scale=scale, softcap=softcap, scores="max", backend=backend)
    assert seen.scores is not None
    scores = agreed(seen.scores.amax(1)[:, :past].contiguous(), group)
    if starts is not None:
        scores.masked_fill_(torch.arange(past, device=scores.device) < starts[:, None], float("-inf"))
    tokens = best_places(scores[:, None], [most], [None], forced=0)[:, 0].long()
    counts = tuple(max(min(most, past - first), 0) for first in firsts)
    if min(counts) < most:
        short = torch.tensor([most - count for count in counts], device=tokens.device)
        tokens = tokens.gather(1, (torch.arange(most, device=tokens.device) - short[:, None]).clamp_(min=0))
    return Past(q_len, k_len, tokens.clamp_(max=past - 1), counts, tuple(firsts))


def attend_past(
    past: Past, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float | None, backend: str
) -> Tensor:
    """Causal attention of a chunk to what was chosen of the past and to itself: (B, H, Q, E).

    q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); zeros for padded queries.
    """
    if isinstance(k, OffloadedTensor):
        k, v = k.offload.chosen(past.tokens)
    else:
        k, v = (_chosen(x, past) for x in (k, v))
    return dense_attention(q, k, v, ragged=_ragged(past), scale=scale, softcap=softcap, backend=backend)


def _chosen(x: Tensor, past: Past) -> Tensor:
    at = past.tokens[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return torch.cat([x.gather(2, at), x[:, :, past.k_len - past.q_len :]], dim=2)


def _ragged(past: Past) -> Ragged | None:
    """Where each sequence's chosen tokens and its part of the chunk lie; None where they all are as long."""
    most, before = past.tokens.shape[1], past.k_len - past.q_len
    if min(past.counts) == most:
        return None
    late = [min(max(first - before, 0), past.q_len) for first in past.firsts]
    return Ragged.of(
        (b, skipped, past.q_len - skipped, most - count + skipped, count + past.q_len - skipped)
        for b, (skipped, count) in enumerate(zip(late, past.counts, strict=True))
        if skipped < past.q_len
    )
