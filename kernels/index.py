"""SparseIndex: the one sparse format that every attention pattern lowers to.

Shapes: B batch, H query heads, Q query length, K key length, R query tiles (rows), N key tiles.

Tiles are TILE x TILE and lie on the grid of absolute key positions. Queries are the last Q of the K
positions, so row 0 holds the tile of the first query (position K - Q) and every row has exactly one
tile on the causal diagonal. A key is computed for a row if one of three entries names it:

* `diagonals`: tile offsets d; row at tile t computes key tile t - d. The same for all rows of a
  head, so a slash costs one number however long the prompt is.
* `tiles`: key tiles listed row by row (block-sparse), all lists end to end; `offsets` says where
  each begins, so that a head takes what its own rows list and nothing for another's (compressed
  sparse rows).
* `columns`: single key positions, the same for all rows of a head, gathered once a head and skipped
  in those rows whose tiles hold them already. At 1M tokens a head's verticals take kilobytes; a
  list for each row would take 64 MB.

Beside them, the rows that hold the last `dense_tail` queries compute every tile up to their own: a
prompt's question is asked there. A sliding `window` takes away what lies too far back.

A head with a bound in `skip` leaves out tiles whose scores say that they do not matter
(skip-softmax; BLASST, arXiv 2512.12087). A query's anchor is its highest logit among its row's
columns, its own tile and key tile 0, if the row computes that. Another tile is skipped if no query
of the row has a logit in it as high as its anchor + bound. Nothing depends on the order of tiles,
so that all backends decide alike, but for rounding. Columns, tiles of the anchors and dense rows
are always computed. BLASST compares with a running maximum from left to right instead: lower at
first.

The entries of a head, and those of a row's list, are ascending and padded at the end with PAD,
which lies beyond every causal limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kernels.copies import on_device
from kernels.ragged import Ragged

TILE = 64
PAD = 2**31 - 1
# Elements of a boolean scratch (rows x tiles or rows x columns, all heads): bounds memory when
# counting at 1M tokens.
_SCRATCH = 1 << 26


def num_tiles(length: int) -> int:
    """Tiles that `length` positions take up."""
    return -(-length // TILE)


def num_rows(q_len: int, k_len: int) -> int:
    """Query tiles that the last `q_len` of `k_len` positions touch."""
    return num_tiles(k_len) - (k_len - q_len) // TILE


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseIndex:
    """Key tiles and key columns that each (batch, query head, query tile) computes.

    diagonals (B, H, ND), tiles (T) and columns (B, H, NC) are int32, offsets (B, H, R + 1) int64,
    on the device of the queries: row r of head h of element b lists tiles[offsets[b, h, r] :
    offsets[b, h, r + 1]]. ND, T and NC may be 0 except that every head has diagonal 0. A key that
    two entries name is computed once.

    Attributes:
        dense_tail: last queries that see every key, rounded up to whole tiles; 0 is none.
        window: a query sees itself and the window - 1 keys before it; tiles outside are not
            computed.
        skip: (B, H) fp32 natural log of a threshold, at most 0 (-inf: nothing is skipped); None: no
            head skips. For each key left out a query loses at most exp(skip) of its largest weight.
        ragged: B is then its number of sequences, q_len and k_len the largest, and tiles and
            columns count from the first key of the sequence.
    """

    q_len: int
    k_len: int
    diagonals: Tensor
    tiles: Tensor
    offsets: Tensor
    columns: Tensor
    dense_tail: int = 0
    window: int | None = None
    skip: Tensor | None = None
    ragged: Ragged | None = None
    # Whether it is known to hold to what validate() asks.
    _valid: bool = field(default=False, init=False, repr=False)
    # For each head how many diagonals, tiles of a row and columns it has at most; None where that
    # is not known.
    _widths: tuple[tuple[int, ...], ...] | None = field(default=None, init=False, repr=False)

    @classmethod
    def built(cls, *, widths: tuple[tuple[int, ...], ...] | None = None, **fields: Any) -> Self:
        """An index that is right by construction, as are its widths: no call checks it again."""
        index = cls(**fields)
        object.__setattr__(index, "_valid", True)
        object.__setattr__(index, "_widths", widths)
        return index

    def changed(self, **fields: Any) -> SparseIndex:
        """The index with other fields, as valid as before (dataclasses.replace checks again)."""
        index = replace(self, **fields)
        object.__setattr__(index, "_valid", self._valid)
        if not fields.keys() & {"diagonals", "tiles", "columns"}:
            object.__setattr__(index, "_widths", self._widths)
        return index

    def widths(self) -> tuple[tuple[int, ...], ...]:
        """Largest number of diagonals, of tiles of a row and of columns of each head.

        Reads no tensor.
        """
        widest = tuple(x.shape[-1] for x in (self.diagonals, self.tiles, self.columns))
        return self._widths or (widest,) * self.num_heads

    def padded_tiles(self, rows: slice = slice(None)) -> Tensor:
        """The lists of some rows, padded to the longest: (B, H, rows, any width) int32."""
        begin = self.offsets[..., :-1][..., rows, None]
        end = self.offsets[..., 1:][..., rows, None]
        if not self.tiles.numel():
            return empty_entries(*begin.shape[:-1], 0, device=self.tiles.device)
        # Where the longest is not known it is read, which waits for a GPU.
        if self._widths is None:
            width = int((end - begin).max())
        else:
            width = max(width for _, width, _ in self._widths)
        at = begin + torch.arange(width, device=begin.device)
        return torch.where(at < end, self.tiles[at.clamp_max_(len(self.tiles) - 1)], PAD)

    @property
    def batch(self) -> int:
        """B."""
        return self.diagonals.shape[0]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.diagonals.shape[1]

    @property
    def first_row(self) -> int:
        """Key tile that holds the first query."""
        return (self.k_len - self.q_len) // TILE

    @property
    def num_rows(self) -> int:
        """Query tiles of the sequence with the most."""
        if self.ragged is None:
            return num_rows(self.q_len, self.k_len)
        return max(num_rows(*each) for each in self.ragged.lengths)

    @property
    def causal_tiles(self) -> int:
        """Tiles on and below the diagonal and inside the window, as dense attention computes."""
        if self.ragged is not None:
            raise ValueError(
                "sequences of a ragged index have each their own: ask index.sequence(i)"
            )
        below = self.window_tiles + 1
        rows = range(self.first_row, num_tiles(self.k_len))
        short = range(rows.start, max(rows.start, min(rows.stop, below)))
        return sum(short) + len(short) + (len(rows) - len(short)) * below

    @property
    def window_tiles(self) -> int:
        """Tiles before its own that a row can see at most."""
        n = num_tiles(self.k_len)
        if self.window is None:
            return n
        return min(n, num_tiles(self.window - 1))

    def sequence(self, s: int) -> SparseIndex:
        """The index of sequence s alone, as a batch of one."""
        q_len = self.q_len
        k_len = self.k_len
        if self.ragged is not None:
            q_len, k_len = self.ragged.lengths[s]
        row = slice(s, s + 1)
        index = self.changed(
            q_len=q_len,
            k_len=k_len,
            diagonals=self.diagonals[row],
            offsets=self.offsets[row, :, : num_rows(q_len, k_len) + 1],
            columns=self.columns[row],
            skip=None if self.skip is None else self.skip[row],
            ragged=None,
        )
        object.__setattr__(index, "_widths", self._widths)
        return index

    def dense_from(self) -> int:
        """Key tile of the first dense row, past the last row if none; not if ragged."""
        return dense_from(self.dense_tail, self.k_len)

    @property
    def nbytes(self) -> int:
        """Bytes of the index's tensors."""
        # Rows that list nothing share one offset.
        entries = (
            self.diagonals,
            self.tiles,
            self.columns,
            *([self.offsets] if self.tiles.numel() else ()),
        )
        return sum(t.numel() * t.element_size() for t in entries)

    def computed_tiles(self, every: int = 1) -> Tensor:
        """TILE x TILE products of each head, (B, H) int64, as the kernels execute them.

        Tiles that `skip` leaves out are included: their scores are computed to decide it.

        A group of TILE columns costs a tile in each row where at least one of its columns is not
        already in a tile.

        Args:
            every: count one row in `every`, beginning in the middle of the first `every` rows.
        """
        if self.ragged is not None:
            return torch.cat([self.sequence(s).computed_tiles(every) for s in range(self.batch)])
        count = torch.zeros(
            self.batch, self.num_heads, dtype=torch.int64, device=self.diagonals.device
        )
        touched = self._tiles_of_column_groups()
        for rows, mask in self.row_masks(every):
            count += mask.sum(dim=(2, 3))
            # A group is computed in a row if one of the tiles it touches lies before the row's own
            # and is not held.
            free = ~mask & self._before(rows, mask.device)
            count += (free.float() @ touched > 0).sum(dim=(2, 3))
        return count

    def density(self, most_rows: int | None = None) -> Tensor:
        """Fraction of the causal tiles that is computed, (B, H) fp32, of up to `most_rows` rows."""
        if self.ragged is not None:
            return torch.cat([self.sequence(s).density(most_rows) for s in range(self.batch)])
        every = 1
        if most_rows is not None:
            every = -(-self.num_rows // most_rows)
        if every == 1:
            return self.computed_tiles().float() / self.causal_tiles
        own = range(self.first_row + every // 2, self.first_row + self.num_rows, every)
        causal = sum(min(tile, self.window_tiles) + 1 for tile in own)
        return self.computed_tiles(every).float() / causal

    def flops(self, head_dim: int, v_dim: int | None = None) -> Tensor:
        """Floating-point operations of both matrix products, (B, H) int64.

        The "FLOPs in kernel" of MInference 1.0, Algorithm 1.
        """
        return self.computed_tiles() * (2 * TILE * TILE * (head_dim + (v_dim or head_dim)))

    def to_mask(self) -> Tensor:
        """The visible keys as a mask (B, H, Q, K), for tests and pictures; of one sequence."""
        offset = self.k_len - self.q_len
        parts = []
        for rows, tiles in self.row_masks():
            keys = tiles.repeat_interleave(TILE, dim=-1)[..., : self.k_len]
            live = self._live_columns(rows, tiles)
            columns = self.columns.long()[:, :, None].expand(-1, -1, len(rows), -1)
            beyond = torch.full_like(columns, self.k_len)
            padded = torch.nn.functional.pad(keys, (0, 1))
            padded.scatter_(-1, torch.where(live, columns, beyond), True)
            parts.append(padded[..., : self.k_len].repeat_interleave(TILE, dim=2))
        skip = offset - self.first_row * TILE
        mask = torch.cat(parts, dim=2)[:, :, skip : skip + self.q_len]
        positions = torch.arange(self.k_len, device=mask.device)
        distance = positions[offset:, None] - positions
        return mask & (distance >= 0) & (distance < (self.window or self.k_len))

    def check_shapes(self) -> None:
        """Raise ValueError where lengths, shapes, dtypes or devices disagree. Reads no data."""
        for name in ("diagonals", "tiles", "offsets", "columns"):
            entries: Tensor = getattr(self, name)
            if not isinstance(entries, Tensor) or entries.layout is not torch.strided:
                layout = getattr(entries, "layout", type(entries).__name__)
                raise ValueError(f"{name} must be a dense tensor, got {layout}")
        if not 0 < self.q_len <= self.k_len:
            raise ValueError(f"q_len must be between 1 and k_len={self.k_len}, got {self.q_len}")
        check_window(self.window)
        tail = self.dense_tail
        skip = self.skip
        heads = tuple(self.diagonals.shape[:2])
        device = self.diagonals.device
        if not is_count(tail, 0):
            raise ValueError(f"dense_tail must be a number of queries, got {tail!r}")
        if skip is not None and (skip.dtype, tuple(skip.shape), skip.device) != (
            torch.float32,
            heads,
            device,
        ):
            raise ValueError(
                f"skip must be float32 {heads} on {device}, got {skip.dtype} "
                f"{tuple(skip.shape)} on {skip.device}"
            )
        if self.ragged is not None:
            longest = (max(self.ragged.q_lens), max(self.ragged.k_lens))
            if len(self.ragged) != self.batch or (self.q_len, self.k_len) != longest:
                raise ValueError(
                    f"index is for {self.batch} sequences of up to {(self.q_len, self.k_len)} "
                    f"queries and keys, "
                    f"its ragged batch has {len(self.ragged)} of up to {longest}"
                )
        some = "any width"
        shapes: dict[str, tuple[object, ...]] = {
            "diagonals": (*heads, some), "columns": (*heads, some),
            "tiles": (some,), "offsets": (*heads, self.num_rows + 1),
        }  # fmt: skip
        for name, shape in shapes.items():
            dtype = torch.int64 if name == "offsets" else torch.int32
            entries = getattr(self, name)
            if entries.dtype != dtype:
                raise ValueError(
                    f"{name} must be {str(dtype).removeprefix('torch.')}, got {entries.dtype}"
                )
            if entries.device != device:
                raise ValueError(f"{name} must be on {device}, got {entries.device}")
            sizes = tuple(entries.shape)
            if len(sizes) != len(shape) or any(
                a not in (b, some) for a, b in zip(shape, sizes, strict=True)
            ):
                raise ValueError(f"{name} must be ({', '.join(map(str, shape))}), got {sizes}")

    def validate(self) -> None:
        """Raise ValueError where an invariant is broken.

        Reads the data, which waits for a GPU. Attention asks for it the first time that it meets an
        index made by hand; those that patterns build are right by the way they are made.
        """
        if self._valid:
            return
        self.check_shapes()
        wrong = (self.offsets < 0) | (self.offsets > len(self.tiles))
        if bool(wrong.any()) or bool((self.offsets.diff(dim=-1) < 0).any()):
            raise ValueError(
                f"offsets must be ascending from 0 to at most {len(self.tiles)}, the entries of "
                f"tiles"
            )
        for name, entries in (
            ("diagonals", self.diagonals),
            ("tiles", self.padded_tiles()),
            ("columns", self.columns),
        ):
            if entries.numel() and int(entries.min()) < 0:
                raise ValueError(f"{name} must not be negative, got {int(entries.min())}")
            ahead = entries[..., 1:]
            behind = entries[..., :-1]
            if not bool(((ahead > behind) | ((ahead == PAD) & (behind == PAD))).all()):
                raise ValueError(f"{name} must be strictly ascending up to the padding")
        if self.diagonals.shape[-1] == 0 or not bool((self.diagonals[..., 0] == 0).all()):
            raise ValueError("every head must compute diagonal 0: a query always sees itself")
        if self.skip is not None and not bool((self.skip <= 0).all()):
            raise ValueError(f"skip must be at most 0, got {float(self.skip.max())}")
        object.__setattr__(self, "_valid", True)

    def row_masks(self, every: int = 1) -> Iterator[tuple[range, Tensor]]:
        """Chunks of rows and the key tiles they compute, (B, H, rows, N) bool, without columns.

        `every` and the first row are as in computed_tiles.
        """
        n = num_tiles(self.k_len)
        heads = self.batch * self.num_heads
        step = max(1, _SCRATCH // (heads * max(n, self.columns.shape[-1], 1)))
        device = self.diagonals.device
        sample = range(every // 2, self.num_rows, every)
        for start in range(0, len(sample), step):
            rows = sample[start : start + step]
            at = torch.arange(rows.start, rows.stop, every, device=device)[:, None] + self.first_row
            # One column more than there are tiles takes what lies outside the causal limit, then
            # goes.
            mask = torch.zeros(
                self.batch, self.num_heads, len(rows), n + 1, dtype=torch.bool, device=device
            )
            key = at - self.diagonals.long()[:, :, None]
            mask.scatter_(-1, torch.where(key >= 0, key, n), True)
            listed = self.padded_tiles(slice(rows.start, rows.stop, every)).long()
            mask.scatter_(-1, torch.where(listed <= at, listed, n), True)
            tile = torch.arange(n, device=device)
            if self.dense_tail:
                mask[..., :n] |= (at >= self.dense_from()) & (tile <= at)
            yield rows, mask[..., :n] & (tile >= at - self.window_tiles)

    def _before(self, rows: range, device: torch.device) -> Tensor:
        """Key tiles before each row's own that it can see, (rows, N) bool."""
        at = torch.arange(rows.start, rows.stop, rows.step, device=device)[:, None] + self.first_row
        tile = torch.arange(num_tiles(self.k_len), device=device)
        return (tile < at) & (tile >= at - self.window_tiles)

    def _tiles_of_column_groups(self) -> Tensor:
        """Key tiles of the columns of each group of TILE, (B, H, N, groups) fp32 of 0 and 1."""
        n = num_tiles(self.k_len)
        columns = self.columns.shape[-1]
        groups = num_tiles(columns)
        touched = torch.zeros(
            self.batch,
            self.num_heads,
            groups * (n + 1),
            device=self.columns.device,
            dtype=torch.float32,
        )
        group = torch.arange(columns, device=self.columns.device) // TILE
        touched.scatter_(-1, group * (n + 1) + (self.columns.long() // TILE).clamp_max(n), 1.0)
        return touched.unflatten(-1, (groups, n + 1))[..., :n].transpose(2, 3)

    def _live_columns(self, rows: range, tiles: Tensor) -> Tensor:
        """Columns that row by row are left to compute, (B, H, rows, NC) bool."""
        free = ~tiles & self._before(rows, tiles.device)
        tile = (self.columns.long() // TILE)[:, :, None].expand(-1, -1, len(rows), -1)
        inside = tile < free.shape[-1]
        return inside & free.gather(-1, torch.where(inside, tile, 0))


def empty_entries(*shape: int, device: torch.device) -> Tensor:
    """Entries of an index that has none of that sort."""
    return torch.empty(*shape, dtype=torch.int32, device=device)


def lists(tiles: Tensor) -> dict[str, Any]:
    """`tiles` and `offsets` of an index from lists (B, H, R, width) padded to one width."""
    batch, heads, rows, width = tiles.shape
    row = torch.arange(rows + 1, device=tiles.device) * width
    head = torch.arange(batch * heads, device=tiles.device) * (rows * width)
    return {
        "tiles": tiles.reshape(-1),
        "offsets": (head[:, None] + row).view(batch, heads, rows + 1),
    }


def no_lists(batch: int, heads: int, rows: int, *, device: torch.device) -> dict[str, Any]:
    """`tiles` and `offsets` of an index that lists nothing; not to be written to."""
    return {
        "tiles": empty_entries(0, device=device),
        "offsets": on_device((0,), device).expand(batch, heads, rows + 1),
    }


def check_window(window: object) -> None:
    """Raise ValueError unless window is an integer from 1 on, or None."""
    if window is not None and not is_count(window, -PAD):
        raise ValueError(f"window must be an integer, got {window!r}")
    if window is not None and not is_count(window):
        raise ValueError(f"window must be at least 1, got {window}")


def is_count(value: object, minimum: int = 1) -> bool:
    """True for an integer that is no less than `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def dense_from(dense_tail: int, k_len: int) -> int:
    """Key tile of the first dense row: the one that holds the first of the last queries."""
    if not dense_tail:
        return num_tiles(k_len)
    return max(k_len - dense_tail, 0) // TILE


def with_dense_tail(index: SparseIndex, queries: int) -> SparseIndex:
    """The index with every key computed for the tiles of the last `queries` queries."""
    if not queries:
        return index
    return index.changed(dense_tail=max(index.dense_tail, queries))
