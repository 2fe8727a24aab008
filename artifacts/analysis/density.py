"""Density of a pattern, computed over causal area, from its sizes alone: no tensors, no model.

Counted as the kernels count it, in tiles of 64 queries by 64 keys, whole prompts at once. Exact for
every pattern that is the same on all prompts, and for block-sparse without a coverage. Where the
prompt chooses, the count is of the plainest choice: a vertical-slash head's columns are taken to be
the first and its diagonals the nearest, and a coverage to need all that the sizes allow. A real
prompt's columns and diagonals lie apart, which takes more tiles, and further on, where fewer
queries see them, which takes less: it is an estimate either way. What skip-softmax skips no size
says."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from artifacts.schema.artifact import Artifact
from artifacts.schema.growth import grown
from artifacts.schema.patterns import TILE, AnyPattern, Layout, Static, num_tiles

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array, Entry

# Longer than any model's prompts; a file may claim any length, and counting takes time and memory
# for each tile.
LONGEST = 2**24
# Of all static patterns together; where there are more, theirs are not counted.
MOST_ENTRIES = 2**21


def density(
    pattern: AnyPattern,
    length: int,
    *,
    dense_tail: int = 0,
    arrays: Mapping[str, Array] | None = None,
) -> float | None:
    """Density on a prompt of `length` tokens, in tiles; above 1 where dense would cost less.

    Args:
        pattern: whose sizes are counted, as they are at this length.
        length: of the prompt, in tokens; the density is None above LONGEST, and of skip_softmax,
            which multiplies every tile and goes on with those whose scores are high.
        dense_tail: last queries that see every key, whatever the pattern.
        arrays: the sidecar's, for the entries of a static pattern; its density is None without
            them.
    """
    if length > LONGEST:
        return None
    tiles = num_tiles(length)
    causal = tiles * (tiles + 1) // 2
    if isinstance(pattern, Static):
        entries = _frozen(pattern, length, arrays)
        if entries is None:
            return None
        rows = _sparse_rows(length, dense_tail)
        computed = _frozen_tiles(*entries, rows)
    else:
        layout = pattern.layout(length)
        if layout is None:
            return None
        rows = _sparse_rows(length, max(dense_tail, layout.last))
        computed = _tiles(layout, length, rows)
    whole = causal - rows * (rows + 1) // 2
    return (whole + computed) / causal


def _sparse_rows(length: int, tail: int) -> int:
    """Rows of tiles before those that hold one of the last `tail` queries."""
    if not tail:
        return num_tiles(length)
    return max(length - tail, 0) // TILE


def densities(
    artifact: Artifact, length: int, arrays: Mapping[str, Array] | None = None
) -> list[list[float | None] | None]:
    """Density of every head, a row for each layer.

    None for a layer that is left alone; all 1 below dense_below."""
    prefill = artifact.prefill
    if sum(array.size for array in static_entries(artifact, arrays)) > MOST_ENTRIES:
        arrays = None
    by_name: dict[str, float | None] = dict.fromkeys(artifact.patterns, 1.0)
    if length >= prefill.dense_below:
        for name, pattern in artifact.patterns.items():
            sized = grown(pattern, prefill.growth, min(length, LONGEST))
            by_name[name] = density(sized, length, dense_tail=prefill.dense_tail, arrays=arrays)
    return [None if row is None else [by_name[name] for name in row] for row in prefill.layers]


def static_entries(artifact: Artifact, arrays: Mapping[str, Array] | None) -> list[Array | Entry]:
    """Header entries of the static patterns' arrays, or the arrays where there is no header."""
    names = {name for p in artifact.patterns.values() if isinstance(p, Static) for name in p.arrays}
    entries: Mapping[str, Any] = getattr(arrays, "entries", arrays) or {}
    return [entries[name] for name in names if name in entries]


def mean_density(
    artifact: Artifact, length: int, arrays: Mapping[str, Array] | None = None
) -> float | None:
    """Mean density of the heads whose density is known; None if there is none."""
    values = [
        value
        for row in densities(artifact, length, arrays)
        for value in row or ()
        if value is not None
    ]
    if values:
        return sum(values) / len(values)
    return None


def _tiles(layout: Layout, length: int, rows: int) -> int:
    """Tiles computed in the first `rows` rows: diagonals, other tiles of first columns, units.

    Row r computes N(r + 1) diagonals, with N(b) = min(near, b) + those of the others before b; of
    the column tiles t it computes those that are not among them."""
    near = layout.near
    step = layout.step
    end = layout.end

    def diagonals(last: int) -> int:
        """The sum of N(b) for b from 1 to `last`."""
        every = min(last, end)
        among = min(last, near, end)
        beyond = _steps(every, step) + (last - every) * -(-end // step)
        shared = _steps(among, step) + (last - among) * -(-min(near, end) // step)
        nearest = min(last, near)
        return nearest * (nearest + 1) // 2 + (last - nearest) * near + beyond - shared

    held = 0
    if layout.columns:
        held = min(num_tiles(min(max(layout.columns, TILE), length)), rows)
    behind = (rows * (rows + 1) - (rows - held) * (rows - held + 1)) // 2
    # Units lie between the first columns and the nearest diagonals: all there are, up to `units`.
    most = max(rows - near - num_tiles(layout.columns), 0)
    units = min(layout.units, most)
    chosen = units * (units + 1) // 2 + (most - units) * units
    return behind + diagonals(rows - held) + chosen


def _steps(last: int, step: int) -> int:
    """Multiples of `step` below b, counted and summed for b from 1 to `last`."""
    whole, rest = divmod(last, step)
    return step * whole * (whole + 1) // 2 + rest * (whole + 1)


def _frozen(
    pattern: Static, length: int, arrays: Mapping[str, Array] | None
) -> tuple[list[int], list[set[int]]] | None:
    columns, diagonals = ((arrays or {}).get(name) for name in pattern.arrays)
    if columns is None or diagonals is None:
        return None
    import numpy as np

    kept = np.union1d(np.arange(min(TILE, length)), columns[columns < length])
    offsets = np.union1d([0], diagonals[diagonals < num_tiles(length)])
    return offsets.tolist(), [
        set((kept[i : i + TILE] // TILE).tolist()) for i in range(0, len(kept), TILE)
    ]


def _frozen_tiles(offsets: Iterable[int], groups: Iterable[set[int]], rows: int) -> int:
    """Tiles computed in the first `rows` rows of tiles.

    A group of columns costs a tile in each row that has one of its tiles behind it and does not
    compute it already. Bit t of a mask is row t."""
    held = [offset for offset in offsets if offset < rows]
    count = sum(rows - offset for offset in held)
    own = sorted({0, *held})
    together = []
    for tiles in groups:
        if len(tiles) == 1:
            behind = max(rows - min(tiles), 0)
            count += behind - bisect_left(own, behind)
        else:
            together.append(tiles)
    if not together:
        return count
    every = (1 << rows) - 1
    free = every & ~sum(1 << offset for offset in own)
    for tiles in together:
        needed = 0
        for tile in tiles:
            needed |= free << tile
        count += (needed & every).bit_count()
    return count
