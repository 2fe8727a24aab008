"""Places of a batch's sequences that are shorter than its tensors: padded, packed, or both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from kernels.copies import DeviceConstant


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """S sequences inside q (B, H, Q, D) and k, v (B, G, K, dim); queries are their last positions.

    Sequence s lies in batch element rows[s]; its queries are q_lens[s] rows of q from q_starts[s]
    on, its keys k_lens[s] rows of k from k_starts[s] on. Lengths are known on the host, as they are
    to whoever made the batch: reading them back from a device would make every layer wait for it.
    """

    rows: tuple[int, ...]
    q_starts: tuple[int, ...]
    q_lens: tuple[int, ...]
    k_starts: tuple[int, ...]
    k_lens: tuple[int, ...]
    _tables: dict[torch.device, DeviceConstant] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len({len(part) for part in self._columns}) != 1 or not self.rows:
            raise ValueError(
                "rows, q_starts, q_lens, k_starts and k_lens must have one entry for each sequence"
            )
        for number in (number for part in self._columns for number in part):
            if not isinstance(number, int):
                raise ValueError(f"rows, starts and lengths must be integers, got {number!r}")
        for s, (row, q_start, q_len, k_start, k_len) in enumerate(self.sequences):
            if not 0 < q_len <= k_len:
                raise ValueError(
                    f"sequence {s}: q_len must be between 1 and k_len={k_len}, got {q_len}"
                )
            if min(row, q_start, k_start) < 0:
                raise ValueError(
                    f"sequence {s}: starts must not be negative, got {(row, q_start, k_start)}"
                )
        # Keys may be shared, queries may not: two sequences would write to one place.
        ends: dict[int, tuple[int, int]] = {}
        for row, q_start, s in sorted(zip(self.rows, self.q_starts, range(len(self)), strict=True)):
            end, before = ends.get(row, (0, 0))
            if q_start < end:
                raise ValueError(
                    f"sequences {before} and {s} overlap: row {q_start} of batch element {row} is "
                    f"a query of both"
                )
            ends[row] = (q_start + self.q_lens[s], s)

    @classmethod
    def from_sequences(cls, sequences: Iterable[Sequence[int]]) -> Self:
        """Sequences from row, q_start, q_len, k_start, k_len of one after another, at least one."""
        rows, q_starts, q_lens, k_starts, k_lens = zip(*sequences, strict=True)
        return cls(rows=rows, q_starts=q_starts, q_lens=q_lens, k_starts=k_starts, k_lens=k_lens)

    @classmethod
    def left_padded(cls, lengths: Sequence[int], q_len: int, k_len: int) -> Self:
        """A batch whose sequence s is the last lengths[s] of k_len keys; q has the last q_len."""
        q_lens = tuple(min(length, q_len) for length in lengths)
        return cls(
            rows=tuple(range(len(lengths))),
            q_starts=tuple(q_len - n for n in q_lens),
            q_lens=q_lens,
            k_starts=tuple(k_len - n for n in lengths),
            k_lens=tuple(lengths),
        )

    @classmethod
    def packed(cls, cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int]) -> Self:
        """One batch element with sequences end to end: their first rows, and the end."""
        return cls(
            rows=(0,) * (len(cu_seqlens_q) - 1),
            q_starts=tuple(cu_seqlens_q[:-1]),
            q_lens=tuple(b - a for a, b in pairwise(cu_seqlens_q)),
            k_starts=tuple(cu_seqlens_k[:-1]),
            k_lens=tuple(b - a for a, b in pairwise(cu_seqlens_k)),
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def _columns(self) -> tuple[tuple[int, ...], ...]:
        return self.rows, self.q_starts, self.q_lens, self.k_starts, self.k_lens

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(q_len, k_len) of each sequence."""
        return tuple(zip(self.q_lens, self.k_lens, strict=True))

    @property
    def flat(self) -> list[int]:
        """row, q_start, q_len, k_start, k_len of one sequence after another."""
        return [number for sequence in self.sequences for number in sequence]

    @property
    def sequences(self) -> Iterator[tuple[int, int, int, int, int]]:
        """row, q_start, q_len, k_start and k_len of one sequence after another."""
        return zip(*self._columns, strict=True)

    def table(self, device: torch.device) -> Tensor:
        """Row, q_start, q_len, k_start and k_len of each sequence, (S, 5) int32, once a device."""
        if device not in self._tables:
            self._tables[device] = DeviceConstant.from_host(
                torch.tensor(self.flat, dtype=torch.int32, device="cpu").view(-1, 5), device
            )
        return self._tables[device].read()

    def fault(self, q_shape: Sequence[int], k_shape: Sequence[int] | None) -> str | None:
        """The reason why the sequences do not lie in q and k (None for paged keys), or None."""
        for s, (row, q_start, q_len, k_start, k_len) in enumerate(self.sequences):
            if row >= q_shape[0] or q_start + q_len > q_shape[2]:
                where = f"rows {q_start} to {q_start + q_len} of batch element {row}"
                return f"sequence {s} has its queries in {where}, q is {tuple(q_shape)}"
            if k_shape is not None and k_start + k_len > k_shape[2]:
                return (
                    f"sequence {s} has its keys in rows {k_start} to "
                    f"{k_start + k_len}, k is {tuple(k_shape)}"
                )
            if k_shape is None and k_start:
                return f"sequence {s} starts at key {k_start}: paged keys start at 0"
        return None

    def covers(self, batch: int, q_len: int) -> bool:
        """True if every query row of a (batch, q_len) tensor belongs to a sequence."""
        return sum(self.q_lens) == batch * q_len
