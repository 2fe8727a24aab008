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
from kernels.merging import with_few_keys
from kernels.ragged import Ragged
from runtime.vllm.batch import Batch, Few, Piece
from runtime.vllm.pages import Pages


class Stream(NamedTuple):
    """A layer that keeps its first tokens and a window of the last: every query sees those, itself included."""

    sinks: int
    window: int

    def __str__(self) -> str:
        return f"{self.sinks} first and {self.window} last tokens"


def attend_pages(
    query: Tensor,
    pages: Pages,
    output: Tensor,
    batch: Batch,
    pieces: tuple[Piece, ...],
    stream: Stream | None = None,
    **how: Any,
) -> None:
    """Write these requests' rows of output (T, H, D): query (T, H, D), keys and values in pages.

    stream: which keys a query sees; None for all of them.
    how: scale, softcap and sinks, as kernels.dense.dense_attention has them.
    """
    # With a window, drafts of one request see different tokens.
    most = MAX_QUERIES if stream is None else 1
    for some in batch.few(tuple(piece for piece in pieces if piece.q_len <= most)):
        if stream is not None and stream not in some.kept:
            some.kept[stream] = _kept(stream, some.ends)
        attend_few(query, pages, output, some, None if stream is None else some.kept[stream], **how)
    for piece in pieces:
        if piece.q_len <= most:
            continue
        q, out = (x[piece.rows].transpose(0, 1)[None] for x in (query, output))
        table = batch.pages(piece, pages.size)[None]
        where: dict[str, Any] = {"ragged": Ragged.of([(0, 0, piece.q_len, 0, piece.k_len)]), "block_table": table}
        if stream is None:
            dense_attention(q, pages.k, pages.v, out=out, **where, **how)
        else:
            windowed = dense_attention(q, pages.k, pages.v, window=stream.window, return_lse=True, **where, **how)
            out.copy_(_with_first(q, pages, table[0], piece, stream, *windowed, **how))
        if pages.v_scale != 1:
            out *= pages.v_scale


def attend_few(query: Tensor, pages: Pages, output: Tensor, some: Few, tokens: Tensor | None, **how: Any) -> None:
    """Write these requests' rows: attention to all tokens, or to these, as decode_attention has them."""
    everyone = slice(0, len(some.ends))
    found = decode_attention(
        *(some.queries(query, everyone), pages.k, pages.v),
        tokens=tokens,
        block_table=some.pages(pages.size),
        ends=some.ends,
        **how,
    ).out
    output[some.rows] = (found if pages.v_scale == 1 else found * pages.v_scale).transpose(1, 2).flatten(0, 1)


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
    pages: Pages,
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

    table: (N,) the request's pages. A learned logit of `sinks` is in the window's already.
    """
    if piece.k_len <= stream.window or not stream.sinks:
        return out
    at = torch.arange(piece.k_len - piece.q_len, piece.k_len, device=q.device)
    first = torch.arange(stream.sinks, device=q.device)
    before = first <= at[:, None] - stream.window
    where = table.long()[first // pages.size], first % pages.size
    keys, values = (held[where].transpose(0, 1)[None] for held in (pages.k, pages.v))
    return with_few_keys(out, lse, q, keys, values, seen=before, scale=scale, softcap=softcap)
