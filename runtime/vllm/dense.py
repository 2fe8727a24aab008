"""Attention of a step's requests over every key, or over the first and last ones, by our own kernels and from pages.

Shapes: T tokens of a step, H query heads, G KV heads, Q new tokens of a request, D head dim, n requests alike, s first
tokens, W window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.decode import MAX_QUERIES, decode_attention
from kernels.dense import dense_attention
from kernels.index import PAD
from kernels.ragged import Ragged
from runtime.vllm.batch import Batch, Few, Piece


class Stream(NamedTuple):
    """A layer that keeps its first tokens and a window of the last: every query sees those, itself included."""

    sinks: int
    window: int

    def __str__(self) -> str:
        return f"{self.sinks} first and {self.window} last tokens"


def attend_densely(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    output: Tensor,
    batch: Batch,
    pieces: tuple[Piece, ...],
    stream: Stream | None = None,
    **how: Any,
) -> None:
    """Write these requests' rows of output (T, H, D): query (T, H, D), keys and values in pages (P, S, G, D).

    stream: which keys a query sees; None for all of them.
    how: scale, softcap and sinks, as kernels.dense.dense_attention has them.
    """
    k, v = cache
    size = k.shape[1]
    # With a window, drafts of one request see different tokens.
    most = MAX_QUERIES if stream is None else 1
    for some in batch.few(tuple(piece for piece in pieces if piece.q_len <= most), size):
        if stream is not None and stream not in some.kept:
            some.kept[stream] = _kept(stream, some.ends.to(query.device, non_blocking=True))
        attend_few(query, cache, output, some, None if stream is None else some.kept[stream], **how)
    for piece in pieces:
        if piece.q_len <= most:
            continue
        table = batch.block_table[piece.request, None, : -(-piece.k_len // size)]
        q, out = (x[piece.rows].transpose(0, 1)[None] for x in (query, output))
        where: dict[str, Any] = {"ragged": Ragged.of([(0, 0, piece.q_len, 0, piece.k_len)]), "block_table": table}
        if stream is None:
            dense_attention(q, k, v, out=out, **where, **how)
            continue
        windowed = dense_attention(q, k, v, window=stream.window, return_lse=True, **where, **how)
        out.copy_(_with_first(q, k, v, table, piece, stream, *windowed, **how))


def attend_few(
    query: Tensor, cache: tuple[Tensor, Tensor], output: Tensor, some: Few, tokens: Tensor | None, **how: Any
) -> None:
    """Write these requests' rows: attention to all tokens, or to these, as decode_attention has them."""
    q = query[some.rows].unflatten(0, (-1, some.q_len)).transpose(1, 2)
    ends = some.ends.to(q.device, non_blocking=True)
    found = decode_attention(q, *cache, tokens=tokens, block_table=some.table, ends=ends, **how).out
    output[some.rows] = found.transpose(1, 2).flatten(0, 1)


def _kept(stream: Stream, ends: Tensor) -> Tensor:
    """The tokens (n, s + W) that the last one of each request sees, whose keys end there (n,)."""
    first = torch.arange(stream.sinks, dtype=torch.int32, device=ends.device).expand(len(ends), -1)
    begin = (ends - stream.window).clamp_min(0)
    last = begin[:, None] + torch.arange(stream.window, dtype=torch.int32, device=ends.device)
    tokens = torch.cat(
        [torch.where(first < begin[:, None], first, PAD), torch.where(last < ends[:, None], last, PAD)], 1
    )
    # Padding goes to the end: few requests are as short as that.
    return tokens.sort(dim=1).values if stream.sinks else tokens


def _with_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    piece: Piece,
    stream: Stream,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """(1, H, Q, D): attention over the window, out and lse (1, H, Q), merged with that over the first tokens.

    Two parts of a softmax over disjoint keys add up, weighted by their log-sum-exp (Flash-Decoding; Dao et al.). A
    learned logit of `sinks` is in the window's already.
    """
    at = torch.arange(piece.k_len - piece.q_len, piece.k_len, device=q.device)
    first = torch.arange(stream.sinks, device=q.device)
    before = first <= at[:, None] - stream.window
    if piece.k_len <= stream.window or not stream.sinks:
        return out
    pages, size = table[0].long(), k.shape[1]
    keys, values = (x[pages[first // size], first % size].float().transpose(0, 1)[None, :, None] for x in (k, v))
    logits = q.float().unflatten(1, (k.shape[2], -1)) @ keys.transpose(3, 4) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~before, float("-inf")).flatten(1, 2)
    whole = torch.logaddexp(lse, logits.logsumexp(-1))
    weights = (logits - whole[..., None]).exp().unflatten(1, (k.shape[2], -1))
    return (out.float() * (lse - whole).exp()[..., None] + (weights @ values).flatten(1, 2)).to(out.dtype)
