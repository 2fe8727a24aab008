"""Step of one layer: its pages, and dense attention of requests from them by our kernels.

Shapes: P pages of the cache, S tokens of a page, N pages of a request; T tokens of a step, H query
heads, G KV heads, Q new tokens of a request, K key length, D head dim; n requests of a group, of
which C tokens are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.decode import decode_attention
from kernels.dense import dense_attention
from kernels.ragged import Ragged
from runtime.attention.chunk import Chunk
from runtime.vllm.batch import Batch, Group

# Tokens of a tile of our kernels: a page that holds one is read in one piece.
PAGE = 64


def split_kv(cache: Tensor, ours: bool) -> tuple[Tensor, Tensor]:
    """Keys and values (P, S, G, D) of a cache (P, G, S, 2 * D).

    A head of a page holds the keys of all its tokens and then their values where the layout is
    ours, so that a tile of keys is one piece of memory; a token's key and then its value where it
    is that of vLLM's backends for GPUs.
    """
    pages, heads, size, width = cache.shape
    if not ours:
        k, v = cache.transpose(1, 2).split(width // 2, dim=-1)
        return k, v
    both = cache.view(pages, heads, 2, size, width // 2)
    return both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)


def quantised(x: Tensor, scale: float, eight_bits: torch.dtype) -> Tensor:
    """Quantise x / scale to 8 bits, as bytes; too large numbers become the largest one."""
    largest = torch.finfo(eight_bits).max
    return (x.float() / scale).clamp(-largest, largest).to(eight_bits).view(torch.uint8)


def write_kv(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write keys and values (T, G, D) into a cache of ours (P, G, S, 2 * D), slots (T,).

    Negative slots are padding, which goes to vLLM's first page: no request owns it.
    """
    slots = slots.clamp_min(0)
    page = slots // cache.shape[2]
    row = slots % cache.shape[2]
    for half, new in zip(split_kv(cache, ours=True), (key, value), strict=True):
        half[page, row] = new[: len(slots)]


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerStep:
    """Inputs and output of a layer in a step.

    Attributes:
        query, output: (T, H, D).
        k, v: (P, S, G, D), pages that hold the step's own keys and values, too.
        v_scale: of the values; that of the keys is part of `options`: scale, softcap and sinks, as
            kernels.attention.sparse_attention has them.
        own: the step's keys and values (T, G, D) before they were stored, where vLLM hands them on.
    """

    batch: Batch
    query: Tensor
    output: Tensor
    k: Tensor
    v: Tensor
    v_scale: float = 1.0
    options: dict[str, Any]
    own: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]

    @property
    def scoring(self) -> dict[str, Any]:
        """Options of kernels that add no learned logits: scale and softcap."""
        return {name: self.options[name] for name in ("scale", "softcap")}

    def request(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and output (1, H, Q, D) of a request, and its pages (1, N)."""
        query = self.query[chunk.queries].transpose(0, 1)[None]
        output = self.output[chunk.queries].transpose(0, 1)[None]
        return query, output, self.batch.pages(chunk, self.size)[None]

    def rescale(self, out: Tensor) -> Tensor:
        """Multiply attention by the scale of the values in the cache, in place."""
        if self.v_scale != 1:
            out.mul_(self.v_scale)
        return out

    def decode(
        self, group: Group, tokens: Tensor | None = None, scores: Literal["none", "max"] = "none"
    ) -> Tensor | None:
        """Write a group's attention to all keys, or to tokens (n, C) or (n, G, C).

        Returns the scores (n, G, K) of kernels.decode.decode_attention, if asked for.
        """
        done = decode_attention(
            self.query[group.rows].unflatten(0, (-1, group.q_len)).transpose(1, 2),
            self.k,
            self.v,
            tokens=tokens,
            block_table=group.pages(self.size),
            ends=group.ends,
            scores=scores,
            **self.options,
        )
        self.output[group.rows] = self.rescale(done.out).transpose(1, 2).flatten(0, 1)
        return done.scores

    def dense(self, chunk: Chunk, **more: Any) -> tuple[Tensor, Tensor]:
        """Dense attention of a chunk from its pages, see kernels.dense.dense_attention."""
        query, _, table = self.request(chunk)
        more |= {
            "ragged": Ragged.from_sequences([(0, 0, chunk.q_len, 0, chunk.k_len)]),
            "block_table": table,
        }
        return dense_attention(query, self.k, self.v, **more, **self.options)

    def attend(self, served: Sequence[Chunk]) -> None:
        """Write attention to every key of requests that are neither served nor generated."""
        groups, chunks = self.batch.rest(served)
        for group in groups:
            self.decode(group)
        for chunk in chunks:
            _, output, _ = self.request(chunk)
            self.dense(chunk, out=output)
            self.rescale(output)
