"""What a forward does, worked out once where its mask is made: which sequences, how long, which
launch serves them.

Shapes: B batch, Q query length, K key length (all slots of the cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from kernels.ragged import Ragged
from runtime.attention.rules import Rows
from runtime.attention.state import enough_queries


class Part(NamedTuple):
    """One sequence of a call: q_len queries from q_start on, the last of the k_len keys from
    k_start on."""

    row: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int

    @property
    def places(self) -> tuple[slice, slice, slice]:
        """Its batch element, its queries and its keys."""
        queries = slice(self.q_start, self.q_start + self.q_len)
        return (
            slice(self.row, self.row + 1),
            queries,
            slice(self.k_start, self.k_start + self.k_len),
        )


class Launch(NamedTuple):
    """Sequences that one launch serves: all rows alike, over the slots `keys` (None: all), or where
    `ragged` says.

    others: the sequences of the call that it leaves.
    """

    parts: tuple[Part, ...] = ()
    others: tuple[Part, ...] = ()
    keys: slice | None = None
    ragged: Ragged | None = None


@dataclass(frozen=True)
class Layout:
    """Where the real tokens are: sequence b is the slots ranges[b] = [start, end) of the cache,
    maybe empty.

    The queries are slots q_start .. q_start + q_len; slots after them are not filled yet. Made once
    a forward, and all layers ask the same one.

    fresh: of the queries' slots those with tokens, [begin, end) counted from q_start, where the
    cache is one that asks
        for no more than that; None elsewhere. `ranges` is then None if sequences have holes.
    held: with `fresh`, the slots [begin, end) of each sequence that are real before the queries;
    None for all slots. window: how many tokens a query sees, itself included, where the layer
    slides; None for all."""

    q_start: int
    q_len: int
    k_len: int
    ranges: tuple[tuple[int, int], ...] | None
    fresh: tuple[tuple[int, int], ...] | None = None
    held: Rows | None = None
    window: int | None = None
    # By the kind of tensors what serves them: see runtime.attention.reasons.
    verdicts: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _launches: dict[Any, Launch] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def batch(self) -> int:
        return len(self.fresh or self.ranges or ())

    @cached_property
    def sequences(self) -> list[tuple[int, int, int]] | None:
        """Row, start and end of each sequence, in slots of the cache; None where they are not
        contiguous."""
        return (
            None
            if self.ranges is None
            else [(row, *slots) for row, slots in enumerate(self.ranges)]
        )

    @cached_property
    def firsts(self) -> tuple[int, ...] | str | None:
        """First key of each sequence, None where all are 0; a string says why they do not all go on
        to the last key."""
        if self.ranges is None:
            return "a sequence has holes"
        if any(end != self.k_len for _, end in self.ranges):
            return "a sequence ends before the last key"
        firsts = tuple(start for start, _ in self.ranges)
        return firsts if any(firsts) else None

    @cached_property
    def longest(self) -> int:
        """Real tokens in the longest sequence, those of the cache included."""
        return max((end - start for _, start, end in self.sequences or ()), default=0)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The sequences that have queries in the call."""
        begun = (
            (row, max(start, self.q_start), start, end) for row, start, end in self.sequences or ()
        )
        return tuple(
            Part(row, first - self.q_start, end - first, start, end - start)
            for row, first, start, end in begun
            if first < end
        )

    @cached_property
    def needs_no_mask(self) -> bool:
        """Whether causal attention from the first key on is all that the mask says: sdpa does that
        without one."""
        near = self.window is None or self.k_len <= self.window
        whole = all((start, end) == (0, self.k_len) for _, start, end in self.sequences or ())
        return near and whole and self.q_len == self.k_len

    @cached_property
    def together(self) -> Launch:
        """All sequences that have queries."""
        return self.launch(self.parts)

    def long(self, dense_below: int, dense_tail: int) -> Launch:
        """The sequences of at least `dense_below` keys whose queries are worth an index."""
        if (dense_below, dense_tail) not in self._launches:
            parts = tuple(
                part
                for part in self.parts
                if part.k_len >= dense_below and enough_queries(part.q_len, part.k_len, dense_tail)
            )
            self._launches[dense_below, dense_tail] = self.launch(parts)
        return self._launches[dense_below, dense_tail]

    def launch(self, parts: tuple[Part, ...]) -> Launch:
        """These of the sequences, maybe none."""
        if parts not in self._launches:
            mine = set(parts)
            keys = None
            ragged = None
            first = parts[0] if parts else None
            rows = len(parts) == self.batch and len({part[1:] for part in parts}) == 1
            if first is not None and rows and first.q_len == self.q_len:
                keys = None if first.k_len == self.k_len else first.places[2]
            elif parts:
                ragged = Ragged.of(parts)
            others = tuple(part for part in self.parts if part not in mine)
            self._launches[parts] = Launch(parts, others, keys, ragged)
        return self._launches[parts]
