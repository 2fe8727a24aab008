"""Context of a forward, made once with its mask: its sequences, and the kernel that serves them.

Shapes: B batch, Q query length, K key length (all slots of the cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from kernels import registry
from kernels.call import Operands
from kernels.ragged import Ragged
from runtime.attention.chunk import Chunk

# Calls with fewer queries than one tile are served as decode, not as prefill (the last queries of a
# prompt, drafts to verify).
MIN_QUERIES = 64
# Smallest chunk behind a past for which patterns serve. An index over a long past costs as much for
# few tokens as for many: behind 8,192 and 32,768 tokens patterns took 0.98 and 1.01 of dense
# attention for 64, 0.78 and 0.67 for 200.
MIN_BEHIND_A_PAST = 128

# Runs of real slots in each row: [start, end) of each.
Rows = tuple[tuple[tuple[int, int], ...], ...]


def is_long(q_len: int, k_len: int, dense_below: int, dense_tail: int) -> bool:
    """True if patterns serve a sequence: it has enough keys, and enough queries for an index.

    Args:
        q_len: its queries, the last of its keys.
        k_len: its keys.
        dense_below: shorter sequences are dense.
        dense_tail: last queries that stay dense in any case.
    """
    minimum = MIN_QUERIES if q_len == k_len else MIN_BEHIND_A_PAST
    return k_len >= dense_below and q_len >= max(minimum, dense_tail + 1)


@dataclass(frozen=True)
class Context:
    """Sequences of a forward: sequence b is the slots ranges[b] = [start, end) of the cache.

    The queries are slots q_start .. q_start + q_len; slots after them are not filled yet. A
    sequence may be empty; ranges is None where one has holes. Every layer of the forward gets the
    same context.

    Attributes:
        fresh: for a cache that drops tokens, the queries' slots that hold tokens, [begin, end) by
            sequence, counted from q_start; None elsewhere.
        held: with `fresh`, the slots [begin, end) of each sequence that are real before the
            queries; None for all slots.
        window: how many tokens a query of a sliding-window layer sees, itself included; None for
            all.
        kernels: kernel and reason by the kind of a call's tensors: see kernel_of.
    """

    q_start: int
    q_len: int
    k_len: int
    ranges: tuple[tuple[int, int], ...] | None
    fresh: tuple[tuple[int, int], ...] | None = None
    held: Rows | None = None
    window: int | None = None
    kernels: dict[Any, tuple[str, str | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def batch(self) -> int:
        """Number of sequences in the call; 0 if unknown."""
        return len(self.fresh or self.ranges or ())

    @cached_property
    def firsts(self) -> tuple[bool, tuple[int, ...] | None]:
        """True where each sequence is one run of slots up to the last key, and their first slots.

        None in place of the slots where all are 0, and with False.
        """
        if self.ranges is None or any(end != self.k_len for _, end in self.ranges):
            return False, None
        firsts = tuple(start for start, _ in self.ranges)
        return True, firsts if any(firsts) else None

    @cached_property
    def sequences(self) -> tuple[Chunk, ...]:
        """The sequences that have queries in the call."""
        sequences = []
        for row, (start, end) in enumerate(self.ranges or ()):
            first = max(start, self.q_start)
            if first < end:
                sequences.append(Chunk(row, first - self.q_start, end - first, start, end - start))
        return tuple(sequences)

    def long(self, dense_below: int, dense_tail: int) -> tuple[Chunk, ...]:
        """Return the sequences that patterns serve: see is_long."""
        key = dense_below, dense_tail
        sequences: tuple[Chunk, ...] | None = self._cache.get(key)
        if sequences is None:
            sequences = tuple(
                sequence
                for sequence in self.sequences
                if is_long(sequence.q_len, sequence.k_len, dense_below, dense_tail)
            )
            self._cache[key] = sequences
        return sequences

    def alone(self, sequence: Chunk) -> Context:
        """Return the context of one sequence alone."""
        if sequence not in self._cache:
            ranges = ((0, sequence.k_len),)
            self._cache[sequence] = Context(
                sequence.k_len - sequence.q_len, sequence.q_len, sequence.k_len, ranges
            )
        context: Context = self._cache[sequence]
        return context

    def cut(self, begin: int, end: int) -> Context:
        """Context of the queries begin .. end alone, of a forward without `fresh`."""
        stop = self.q_start + end
        ranges = None
        if self.ranges is not None:
            ranges = tuple((min(first, stop), min(last, stop)) for first, last in self.ranges)
        start = self.q_start + begin
        return Context(start, end - begin, self.k_len, ranges, window=self.window)

    def rows_of(self, sequences: tuple[Chunk, ...]) -> tuple[slice | None, Ragged | None]:
        """Return slots of the keys (None: all) and Ragged (None: whole rows) of one launch."""
        rows: tuple[slice | None, Ragged | None] | None = self._cache.get(sequences)
        if rows is None:
            rows = self._rows_of(sequences)
            self._cache[sequences] = rows
        return rows

    def _rows_of(self, sequences: tuple[Chunk, ...]) -> tuple[slice | None, Ragged | None]:
        alike = len(sequences) == self.batch and len({sequence[1:] for sequence in sequences}) == 1
        if not alike or sequences[0].q_len != self.q_len:
            return None, Ragged.from_sequences([sequence[:5] for sequence in sequences])
        if sequences[0].k_len == self.k_len:
            return None, None
        return sequences[0].slots[2], None


def kernel_for(backend: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str | None]:
    """Backend that serves such queries, keys and values, or the reason why none does.

    "auto" excludes the reference, which is slower than dense; it serves only by its name.
    """
    if k.shape[:3] != v.shape[:3]:
        return "", f"keys and values do not go together: {tuple(k.shape)}, {tuple(v.shape)}"
    operands = Operands(q, k, v)
    if backend != "auto":
        reason = registry.implementation("attention", backend).supports(operands)
        if reason is not None:
            return "", f"kernel {backend}: {reason}"
        return backend, None
    # By its name: a kernel that turns out not to build is not replaced by the reference.
    return registry.fast("attention", operands)
