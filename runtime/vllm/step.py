"""A step of one layer: attention of its requests from pages, by our own kernels.

Shapes: T tokens of a step, H query heads, G KV heads, Q new tokens of a request, K key length, D head dim, n requests
alike, N pages of a request, C tokens that are read, s first tokens, W window.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from artifacts import Streaming
from kernels.decode import MAX_QUERIES, decode_attention
from kernels.dense import dense_attention
from kernels.index import PAD
from kernels.merging import with_few_keys
from kernels.ragged import Ragged
from runtime.vllm.batch import Batch, Few, Piece
from runtime.vllm.pages import Pages


class LayerStep(NamedTuple):
    """What a layer is asked in a step, and where its attention is written.

    query: (T, H, D) in the model's dtype. pages: keys and values, with those of the step. output: (T, H, D).
    how: scale, softcap and sinks, as kernels.attention.sparse_attention has them; the scale counts in the pages' own.
    key, value: (T, G, D) of the step's tokens as they were before they were stored; None where vLLM hands on none.
    """

    batch: Batch
    query: Tensor
    pages: Pages
    output: Tensor
    how: dict[str, Any]
    key: Tensor | None = None
    value: Tensor | None = None

    def of(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """A request's queries and their output (1, H, Q, D), and its pages (1, N)."""
        q, out = (x[piece.rows].transpose(0, 1)[None] for x in (self.query, self.output))
        return q, out, self.batch.pages(piece, self.pages.size)[None]

    def decode(
        self, few: Few, tokens: Tensor | None = None, scores: Literal["none", "max", "sum"] = "none"
    ) -> Tensor | None:
        """Write attention of requests alike to all of their tokens, or to these; (n, G, K) scores, if asked for.

        tokens: (n, C) or (n, G, C), as kernels.decode.decode_attention has them.
        """
        done = decode_attention(
            self.query[few.rows].unflatten(0, (-1, few.q_len)).transpose(1, 2),
            self.pages.k,
            self.pages.v,
            tokens=tokens,
            block_table=few.pages(self.pages.size),
            ends=few.ends,
            scores=scores,
            **self.how,
        )
        out = done.out if self.pages.v_scale == 1 else done.out * self.pages.v_scale
        self.output[few.rows] = out.transpose(1, 2).flatten(0, 1)
        return done.scores

    def attend(self, pieces: tuple[Piece, ...], stream: Streaming | None = None) -> None:
        """Write these requests' attention to every key, or of each query to the first ones and a window of the last."""
        # With a window, drafts of one request see different tokens.
        most = MAX_QUERIES if stream is None else 1
        for few in self.batch.few(tuple(piece for piece in pieces if piece.q_len <= most)):
            self.decode(few, None if stream is None else few.kept_by(stream, partial(_kept, stream, few.ends)))
        for piece in pieces:
            if piece.q_len <= most:
                continue
            q, out, table = self.of(piece)
            where: dict[str, Any] = {"ragged": Ragged.of([(0, 0, piece.q_len, 0, piece.k_len)]), "block_table": table}
            if stream is None:
                dense_attention(q, self.pages.k, self.pages.v, out=out, **where, **self.how)
            else:
                how = where | self.how
                windowed = dense_attention(q, *self.pages[:2], window=stream.window, **how)
                out.copy_(self._with_first(piece, stream, *windowed))
            if self.pages.v_scale != 1:
                out *= self.pages.v_scale

    def _with_first(self, piece: Piece, stream: Streaming, out: Tensor, lse: Tensor) -> Tensor:
        """(1, H, Q, D): attention over the window, out and lse (1, H, Q), merged with that over the first tokens.

        A learned logit of `sinks` is in the window's already.
        """
        if piece.k_len <= stream.window or not stream.sinks:
            return out
        q, _, table = self.of(piece)
        at = torch.arange(piece.k_len - piece.q_len, piece.k_len, device=q.device)
        first = torch.arange(stream.sinks, device=q.device)
        where = table[0].long()[first // self.pages.size], first % self.pages.size
        k, v = (held[where].transpose(0, 1)[None] for held in self.pages[:2])
        seen = first <= at[:, None] - stream.window
        return with_few_keys(out, lse, q, k, v, seen=seen, scale=self.how["scale"], softcap=self.how["softcap"])


def _kept(stream: Streaming, ends: Tensor) -> Tensor:
    """The tokens (n, s + W) that the last one of each request sees, whose keys end there (n,)."""
    first = torch.arange(stream.sinks, dtype=torch.int32, device=ends.device).expand(len(ends), -1)
    begin = (ends - stream.window).clamp_min(0)
    last = begin[:, None] + torch.arange(stream.window, dtype=torch.int32, device=ends.device)
    tokens = torch.cat(
        [torch.where(first < begin[:, None], first, PAD), torch.where(last < ends[:, None], last, PAD)], 1
    )
    # Padding goes to the end: few requests are as short as that.
    return tokens.sort(dim=1).values if stream.sinks else tokens
