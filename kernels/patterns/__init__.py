"""Attention patterns by kind, and LayerPlan, which lowers a layer of unlike heads to an index.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from torch import Tensor

from kernels.checks import check_groups, check_query_length, check_tensors
from kernels.index import TILE, SparseIndex, num_tiles, with_dense_tail
from kernels.joining import concat_sequences
from kernels.patterns.a_shape import AShape
from kernels.patterns.base import NOT_SIZES, Builder, Inputs, Part, Pattern, SelectCall
from kernels.patterns.block_sparse import BlockSparse
from kernels.patterns.dense import Dense, dense_index
from kernels.patterns.paged import Keys, Paged, of_sequence
from kernels.patterns.skip_softmax import SkipSoftmax
from kernels.patterns.vertical_slash import VerticalSlash
from kernels.ragged import Ragged

__all__ = [
    "KINDS",
    "NOT_SIZES",
    "AShape",
    "BlockSparse",
    "Builder",
    "Dense",
    "Inputs",
    "LayerPlan",
    "Pattern",
    "SkipSoftmax",
    "VerticalSlash",
    "largest",
    "make",
]

_ALL: tuple[type[Pattern], ...] = (Dense, AShape, VerticalSlash, BlockSparse, SkipSoftmax)
KINDS: dict[str, type[Pattern]] = {cls.kind: cls for cls in _ALL}


def make(kind: str, **sizes: Any) -> Pattern:
    """The pattern of that kind with those fields, sizes for the most part.

    Raises:
        ValueError: an unknown kind, an unknown size, a missing one, or one that is not as the
            pattern wants it.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown pattern kind {kind!r}; known: {', '.join(KINDS)}")
    needed = {field.name: field.default is MISSING for field in fields(KINDS[kind])}
    if unknown := sorted(set(sizes) - set(needed)):
        raise ValueError(
            f"{kind} has no size {unknown[0]!r}; it has: {', '.join(needed) or 'none'}"
        )
    if missing := [name for name, need in needed.items() if need and name not in sizes]:
        raise ValueError(f"{kind} needs a size {missing[0]!r}")
    return KINDS[kind](**sizes)


def largest(patterns: Sequence[Pattern]) -> Pattern:
    """A pattern that none of these, all of one kind and last_q, is larger than."""
    first = patterns[0]
    names = [
        name
        for name, value in vars(first).items()
        if name != "coverage" and type(value) in (int, float)
    ]
    return make(first.kind, **{name: max(getattr(p, name) for p in patterns) for name in names})


# Plans for other lengths that a plan remembers: chunks of a prompt ask for each once, a batch for a
# few at once.
_LENGTHS = 16
_growing = threading.Lock()


class LayerPlan:
    """The patterns of one layer, sorted by kind: a forward builds each kind in one call."""

    def __init__(
        self,
        patterns: Sequence[Pattern],
        num_kv_heads: int,
        *,
        dense_tail: int = 0,
        length: int | None = None,
    ) -> None:
        """Plan one pattern a query head.

        Args:
            patterns: in the order of the query heads.
            num_kv_heads: KV heads that they read.
            dense_tail: number of last queries of a call that see every key in any case.
            length: number of keys that the sizes are for; on more keys they grow in proportion.
                None: they stay as they are.

        Raises:
            ValueError: heads that do not divide.
        """
        check_groups(len(patterns), num_kv_heads)
        self.patterns = tuple(patterns)
        self.num_kv_heads = num_kv_heads
        self.dense_tail = dense_tail
        self.length = length
        self._kinds: dict[type[Pattern], list[int]] = {}
        for head, pattern in enumerate(patterns):
            self._kinds.setdefault(type(pattern), []).append(head)
        self._parts: dict[tuple[int, ...], LayerPlan] = {}
        self._lengths: dict[int, LayerPlan] = {}

    def select_kv_heads(self, kv_heads: tuple[int, ...]) -> LayerPlan:
        """The plan of these KV heads and the query heads that read them."""
        if kv_heads not in self._parts:
            some = [self.patterns[head] for head in self.query_heads(kv_heads)]
            self._parts[kv_heads] = LayerPlan(
                some, len(kv_heads), dense_tail=self.dense_tail, length=self.length
            )
        return self._parts[kv_heads]

    def at(self, k_len: int) -> LayerPlan:
        """The plan with its patterns' sizes on `k_len` keys; itself where nothing grows.

        Lengths count in whole tiles: a cache that grows does not plan again for every token.
        """
        tiles = num_tiles(k_len)
        if self.length is None or tiles <= num_tiles(self.length):
            return self
        # Several requests of different lengths may be served at once.
        with _growing:
            # Taken out and put back, so that the one not asked for longest is the first.
            plan = self._lengths.pop(tiles, None)
            if plan is None:
                grown = {
                    pattern: pattern.scaled(tiles / num_tiles(self.length))
                    for pattern in dict.fromkeys(self.patterns)
                }
                some = [grown[pattern] for pattern in self.patterns]
                plan = LayerPlan(some, self.num_kv_heads, dense_tail=self.dense_tail)
                if len(self._lengths) == _LENGTHS:
                    del self._lengths[next(iter(self._lengths))]
            self._lengths[tiles] = plan
        return plan

    def query_heads(self, kv_heads: tuple[int, ...]) -> list[int]:
        """The query heads that read these KV heads, KV head by KV head."""
        group = len(self.patterns) // self.num_kv_heads
        return [kv_head * group + i for kv_head in kv_heads for i in range(group)]

    def build(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        ragged: Ragged | None = None,
        block_table: Tensor | None = None,
        k_len: int | None = None,
    ) -> SparseIndex:
        """The index of all heads for queries (B, H, Q, D), the last Q of the K positions.

        Growing sizes are those for K keys, or for the number of keys of each sequence: a sequence's
        index does not depend on the rest of its batch.

        Args:
            q: queries; with `ragged` each of its sequences has its queries last.
            k: (B, G, K, D) keys. With a block table a cache (pages, page size, G, D) of q's dtype,
                or of 8 bits, which are read in q's dtype.
            scale: factor on the logits; D ** -0.5 if None.
            window: a sliding layer's window: a query sees itself and the window - 1 keys before it.
            ragged: where the sequences lie, if they are not all as long as the tensors.
            block_table: (sequences, at least ceil(K / page size)) int32: the page that holds keys i
                * page size and on. Patterns that choose by keys read them where they lie.
            k_len: with a block table and without `ragged`, K.

        Raises:
            ValueError: shapes that do not go together, or heads that the plan was not made for.
        """
        check_tensors(q=q, k=k)
        keys: Keys = k
        if block_table is not None:
            if ragged is None:
                lengths = (k_len,) * q.shape[0]
            else:
                lengths = ragged.k_lens
            keys = Paged.from_cache(k, block_table, lengths, q.dtype)
        if q.shape[3] != keys.shape[3] or (ragged is None and q.shape[0] != keys.shape[0]):
            raise ValueError(
                f"q and k must share batch and head dim, got q {tuple(q.shape)}, k "
                f"{tuple(keys.shape)}"
            )
        if q.shape[1] != len(self.patterns) or keys.shape[1] != self.num_kv_heads:
            raise ValueError(
                f"planned for {len(self.patterns)} query and {self.num_kv_heads} KV heads, "
                f"got {q.shape[1]} and {keys.shape[1]}"
            )
        if scale is None:
            scale = q.shape[-1] ** -0.5
        if ragged is None:
            index = self.at(keys.shape[2])._build(q, keys, scale, window)
        else:
            if fault := ragged.fault(q.shape, keys.shape if block_table is None else None):
                raise ValueError(fault)
            parts = []
            for s, (row, q_start, q_len, k_start, length) in enumerate(ragged.sequences):
                queries = q[row : row + 1, :, q_start : q_start + q_len]
                some = of_sequence(keys, s, row, k_start, length)
                parts.append(self.at(length)._build(queries, some, scale, window))
            index = concat_sequences(parts, ragged)
        return with_dense_tail(index.changed(window=window), self.dense_tail)

    def _build(self, q: Tensor, k: Keys, scale: float, window: int | None) -> SparseIndex:
        check_query_length(q.shape[2], k.shape[2])
        if (
            self.dense_tail
            and max(k.shape[2] - self.dense_tail, 0) // TILE <= (k.shape[2] - q.shape[2]) // TILE
        ):
            # Every row is one of the tail: there is nothing to select.
            return dense_index(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
        parts = []
        for cls, heads in self._kinds.items():
            patterns = [self.patterns[head] for head in heads]
            builder = cls.prepare(patterns, Inputs(heads, q, k, scale, window))
            parts.append(Part(heads, patterns, builder))
        return SelectCall(parts).run()
