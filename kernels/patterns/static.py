"""Static columns and diagonals, the same on every prompt (MInference 1.0, "Ours w/ static").

Shapes: h heads of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.copies import Copy
from kernels.index import PAD, TILE, SparseIndex, num_tiles
from kernels.patterns.fixed import Fixed


def _not_ascending(value: object) -> str | None:
    """The reason why the value is no list of positions, None if it is one."""
    if not isinstance(value, tuple):
        return f"must be a tuple of integers, got {type(value).__name__}"
    before = -1
    for at in value:
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < PAD:
            return f"must hold integers from 0 to {PAD - 1}, got {at!r}"
        if at <= before:
            return f"must be ascending, got {at} after {before}"
        before = at
    return None


@dataclass(frozen=True, kw_only=True)
class Static(Fixed):
    """Key columns, in tokens, and diagonals of tiles, as distances from the query's own tile.

    Both ascending. The query's own tile and the first tile of keys are kept whether named or not.
    What lies beyond the end of a prompt waits for a longer one."""

    kind: ClassVar[str] = "static"

    columns: tuple[int, ...] = field(metadata={"fault": _not_ascending})
    diagonals: tuple[int, ...] = field(metadata={"fault": _not_ascending})

    def __post_init__(self) -> None:
        super().__post_init__()
        # Thousands of numbers, asked for at every build.
        object.__setattr__(self, "_hash", hash((self.columns, self.diagonals)))

    def __hash__(self) -> int:
        made: int = self.__dict__["_hash"]
        return made

    @classmethod
    def entries(
        cls, patterns: Sequence[Self], k_len: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """See Fixed.entries."""
        diagonals, columns = (table.read() for table in _tables(tuple(patterns), device))
        return _below(num_tiles(k_len), diagonals), _below(k_len, columns)


def freeze(index: SparseIndex) -> list[Static]:
    """One pattern a head that computes on every prompt what `index` does in its first sequence.

    The window and the dense tail of the index belong to its call and are not frozen.

    Raises:
        ValueError: a head lists tiles row by row, which hold for its own prompt alone.
    """
    listed = (index.listed()[0] != PAD).any(dim=-1).any(dim=-1).tolist()
    if any(listed):
        raise ValueError(
            f"head {listed.index(True)} lists tiles row by row (block-sparse): only columns and "
            f"diagonals can be frozen"
        )
    pairs = zip(index.columns[0].tolist(), index.diagonals[0].tolist(), strict=True)
    return [
        Static(columns=_unpadded(columns), diagonals=_unpadded(diagonals))
        for columns, diagonals in pairs
    ]


def _unpadded(entries: list[int]) -> tuple[int, ...]:
    return tuple(at for at in entries if at != PAD)


@lru_cache(maxsize=256)
def _tables(patterns: tuple[Static, ...], device: torch.device) -> tuple[Copy, Copy]:
    """Diagonals and columns of all patterns on an endless prompt; shared: not to be written to."""
    diagonals = [sorted({0, *p.diagonals}) for p in patterns]
    columns = [sorted({*range(TILE), *p.columns}) for p in patterns]
    return _table(diagonals, device), _table(columns, device)


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Copy:
    width = max(map(len, rows))
    with torch.inference_mode(False):
        made = torch.tensor(
            [[*row, *[PAD] * (width - len(row))] for row in rows], dtype=torch.int32, device="cpu"
        )
        return Copy.of(made, device)


def _below(limit: int, entries: Tensor) -> Tensor:
    """The entries below `limit`, which are at most so many; the others are padding."""
    return torch.where(entries[:, :limit] < limit, entries[:, :limit], PAD)
