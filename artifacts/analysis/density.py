"""Density of a pattern from its sizes alone, without tensors or a model.

Density is the computed area divided by the causal area. Tiles are counted as in the kernels: 64
queries by 64 keys, over a whole prompt. The count is exact for every pattern that is the same on
all prompts, and for block-sparse without a coverage.

For patterns that depend on the prompt, the count is an estimate. It assumes that the columns of a
vertical-slash head are the first keys and its diagonals are the nearest ones, and that a coverage
needs everything that the sizes allow. On a real prompt, columns and diagonals are spread out, which
takes more tiles. They are also further on, where fewer queries see them, which takes fewer tiles.
The density of skip-softmax cannot be derived from its sizes.
"""

from __future__ import annotations

from artifacts.schema.artifact import Artifact
from artifacts.schema.patterns import TILE, AnyPattern, Layout, grown, num_tiles

# Longer than the prompts of any model. A file can contain any length, and the count takes time and
# memory for each tile.
LONGEST = 2**24


def density(
    pattern: AnyPattern,
    length: int,
    *,
    dense_tail: int = 0,
) -> float | None:
    """Density on a prompt of `length` tokens, in tiles; above 1 if dense attention costs less.

    Args:
        pattern: pattern with its sizes at this length.
        length: prompt length in tokens.
        dense_tail: number of last queries that see every key, for every pattern.

    Returns:
        The density, or None above LONGEST and for skip_softmax. skip_softmax computes the scores of
        every tile and uses the values only of tiles with high scores.
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
    """Number of tile rows before the first row with one of the last `tail` queries."""
    if not tail:
        return num_tiles(length)
    return max(length - tail, 0) // TILE


def densities(artifact: Artifact, length: int) -> list[list[float | None] | None]:
    """Density of every head, one row per layer.

    A layer without patterns is None. All densities are 1 below dense_below.
    """
    prefill = artifact.prefill
    by_name: dict[str, float | None] = dict.fromkeys(artifact.patterns, 1.0)
    if length >= prefill.dense_below:
        for name, pattern in artifact.patterns.items():
            sized = grown(pattern, prefill.length, min(length, LONGEST))
            by_name[name] = density(sized, length, dense_tail=prefill.dense_tail)
    return [None if row is None else [by_name[name] for name in row] for row in prefill.layers]


def mean_density(artifact: Artifact, length: int) -> float | None:
    """Mean density of the heads with a known density; None if no head has one."""
    values = [
        value for row in densities(artifact, length) for value in row or () if value is not None
    ]
    if values:
        return sum(values) / len(values)
    return None


def _tiles(layout: Layout, length: int, rows: int) -> int:
    """Number of tiles computed in the first `rows` rows: near diagonals and first columns.

    Row r has r + 1 causal tiles. It computes the column tiles and, of the remaining tiles, at most
    one per near diagonal.
    """
    held = 0
    if layout.columns:
        held = min(num_tiles(min(max(layout.columns, TILE), length)), rows)
    behind = (rows * (rows + 1) - (rows - held) * (rows - held + 1)) // 2
    other_rows = rows - held
    near = min(other_rows, layout.near)
    return behind + near * (near + 1) // 2 + (other_rows - near) * layout.near
