"""Density of a pattern, computed over causal area, from its sizes alone: no tensors, no model.

Counted as the kernels count it, in tiles of 64 queries by 64 keys, whole prompts at once. Exact for
every pattern that is the same on all prompts, and for block-sparse without a coverage. Where the
prompt chooses, the count is of the plainest choice: a vertical-slash head's columns are taken to be
the first and its diagonals the nearest, and a coverage to need all that the sizes allow. A real
prompt's columns and diagonals lie apart, which takes more tiles, and further on, where fewer
queries see them, which takes less: it is an estimate either way. What skip-softmax skips no size
says."""

from __future__ import annotations

from artifacts.schema.artifact import Artifact
from artifacts.schema.patterns import TILE, AnyPattern, Layout, grown, num_tiles

# Longer than any model's prompts; a file may claim any length, and counting takes time and memory
# for each tile.
LONGEST = 2**24


def density(
    pattern: AnyPattern,
    length: int,
    *,
    dense_tail: int = 0,
) -> float | None:
    """Density on a prompt of `length` tokens, in tiles; above 1 where dense would cost less.

    Args:
        pattern: whose sizes are counted, as they are at this length.
        length: of the prompt, in tokens; the density is None above LONGEST, and of skip_softmax,
            which multiplies every tile and goes on with those whose scores are high.
        dense_tail: last queries that see every key, whatever the pattern.
    """
    if length > LONGEST:
        return None
    tiles = num_tiles(length)
    causal = tiles * (tiles + 1) // 2
    layout = pattern.layout(length)
    if layout is None:
        return None
    rows = _sparse_rows(length, dense_tail)
    computed = _tiles(layout, length, rows)
    whole = causal - rows * (rows + 1) // 2
    return (whole + computed) / causal


def _sparse_rows(length: int, tail: int) -> int:
    """Rows of tiles before those that hold one of the last `tail` queries."""
    if not tail:
        return num_tiles(length)
    return max(length - tail, 0) // TILE


def densities(artifact: Artifact, length: int) -> list[list[float | None] | None]:
    """Density of every head, a row for each layer.

    None for a layer that is left alone; all 1 below dense_below."""
    prefill = artifact.prefill
    by_name: dict[str, float | None] = dict.fromkeys(artifact.patterns, 1.0)
    if length >= prefill.dense_below:
        for name, pattern in artifact.patterns.items():
            sized = grown(pattern, prefill.length, min(length, LONGEST))
            by_name[name] = density(sized, length, dense_tail=prefill.dense_tail)
    return [None if row is None else [by_name[name] for name in row] for row in prefill.layers]


def mean_density(artifact: Artifact, length: int) -> float | None:
    """Mean density of the heads whose density is known; None if there is none."""
    values = [
        value for row in densities(artifact, length) for value in row or () if value is not None
    ]
    if values:
        return sum(values) / len(values)
    return None


def _tiles(layout: Layout, length: int, rows: int) -> int:
    """Tiles computed in the first `rows` rows: diagonals, and other tiles of first columns.

    Row r has r + 1 causal tiles. It computes the column tiles, and as many of the others as there
    are near diagonals."""
    held = 0
    if layout.columns:
        held = min(num_tiles(min(max(layout.columns, TILE), length)), rows)
    behind = (rows * (rows + 1) - (rows - held) * (rows - held + 1)) // 2
    others = rows - held
    near = min(others, layout.near)
    return behind + near * (near + 1) // 2 + (others - near) * layout.near
