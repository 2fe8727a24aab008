"""The context bank: keys and values of layers in CPU memory, in pages, so that growing copies nothing (OmniKV, 4.2).

A token's row holds, for one layer, the key and the value of one KV head after another: fetching a token is one copy.

Shapes: L layers, P tokens of a page, B batch, G KV heads, D head dim, E value dim, R = G * (D + E) numbers in a row, n
tokens, A and N: layers and rows that are fetched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from runtime.omnikv.lane import Lane

# A page holds at least so many tokens, and this share of the whole: few pages, little room unused.
_LEAST = 256
_SHARE = 16


class Row(NamedTuple):
    """What a token's row is made of in one layer."""

    heads: int
    k_dim: int
    v_dim: int

    @property
    def width(self) -> int:
        return self.heads * (self.k_dim + self.v_dim)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Rows (Q, B, R) of keys (B, G, Q, D) and values (B, G, Q, E)."""
        rows = k.new_empty(k.shape[2], k.shape[0], self.width)
        for part, states in zip(self.unpack(rows), (k, v), strict=True):
            part.copy_(states.detach())
        return rows

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, G, n, D) and values (B, G, n, E) as views of rows (n, B, R)."""
        k, v = rows.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3).split((self.k_dim, self.v_dim), dim=-1)
        return k, v


class Bank:
    """Rows of L layers and B sequences; those of each layer are written in order, and read when they are there."""

    def __init__(self, layers: int, batch: int, row: Row, dtype: torch.dtype, lane: Lane) -> None:
        self.layers, self.batch, self.row, self.dtype, self.lane = layers, batch, row, dtype, lane
        self.width = row.width
        # (L, P, B, R) each.
        self.pages: list[Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.lane.arrived()
        new = copy.copy(self)
        memo[id(self)] = new
        new.lane, new.pages = copy.deepcopy(self.lane, memo), []
        for page in self.pages:
            new._add(page.shape[1])
            new.pages[-1].copy_(page)
        return new

    @property
    def nbytes(self) -> int:
        """Bytes of memory given out, the room for new tokens included."""
        return sum(page.untyped_storage().nbytes() for page in self.pages)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens."""
        token = self.layers * self.batch * self.width * self.dtype.itemsize
        while (missing := length - sum(page.shape[1] for page in self.pages)) > 0:
            least = max(_LEAST * token, self.nbytes // _SHARE)
            # Pinned memory is given out in powers of two: what is missing is made up of several.
            nbytes = max(1 << ((missing * token).bit_length() - 1), 1 << (least - 1).bit_length())
            self._add(nbytes // token, nbytes)

    def write(self, layer: int, start: int, rows: Tensor) -> None:
        """Take in rows (n, B, R) of the device as tokens `start` and on of a layer; room must have been made."""
        for page, first, here in self._span(start, start + rows.shape[0]):
            self.lane.send(page[layer, here], rows[first - start :][: here.stop - here.start])

    def read(self, layer: int, length: int, out: Tensor) -> None:
        """The first tokens of a layer to the device: rows out[:length] of (at least length, B, R)."""
        for page, first, here in self._span(0, length):
            self.lane.receive(out[first:][: here.stop - here.start], page[layer, here])

    def gather(self, layers: Tensor, sequences: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
        """Rows of tokens (N,), ascending, of sequences (N,) and all of layers (A,): to out (A * N, R), page after page.

        Returns:
            (A * N,): out[i] is of layers[order[i] // N] and token order[i] % N.
        """
        count, places = tokens.numel(), layers.numel()
        place, number = torch.arange(places)[:, None], torch.arange(count)
        bounds = [0, *accumulate(page.shape[1] for page in self.pages)]
        cuts = torch.searchsorted(tokens, torch.tensor(bounds)).tolist()
        order = []
        for page, first, lo, hi in zip(self.pages, bounds, cuts, cuts[1:], strict=False):
            if hi > lo:
                rows = (layers[:, None] * page.shape[1] + tokens[lo:hi] - first) * self.batch + sequences[lo:hi]
                found = out[places * lo : places * hi]
                torch.index_select(page.view(-1, self.width), 0, rows.flatten(), out=found)
                order.append((place * count + number[lo:hi]).flatten())
        return torch.cat(order)

    def select(self, sequences: Tensor, length: int) -> None:
        """Let sequence b be what sequence sequences[b] was, in the first `length` tokens."""
        self.lane.arrived()
        old, same = self.pages, len(sequences) == self.batch
        self.batch = len(sequences)
        if not same:
            self.pages = []
            self.reserve(length)
        first = 0
        for page in old:
            count = min(page.shape[1], length - first)
            for layer in range(self.layers):
                chosen = page[layer, : max(count, 0)].index_select(1, sequences)
                for target, at, here in self._span(first, first + chosen.shape[0]):
                    target[layer, here] = chosen[at - first :][: here.stop - here.start]
            first += page.shape[1]

    def _add(self, tokens: int, nbytes: int | None = None) -> None:
        shape = (self.layers, tokens, self.batch, self.width)
        size = self.layers * tokens * self.batch * self.width
        with torch.inference_mode(False):
            memory = self.lane.memory(nbytes or size * self.dtype.itemsize)
            self.pages.append(memory[: size * self.dtype.itemsize].view(self.dtype).view(shape))

    def _span(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, slice]]:
        """Tokens start to stop page by page: the page, the first of them in it, and which of its tokens they are."""
        before = 0
        for page in self.pages:
            lo, hi = max(start, before), min(stop, before + page.shape[1])
            if lo < hi:
                yield page, lo, slice(lo - before, hi - before)
            before += page.shape[1]
