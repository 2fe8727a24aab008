"""Fixed patterns and memory units against masks written down from their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.index import PAD, TILE, num_tiles
from kernels.patterns import LayerPlan, MemoryUnits, make

LENGTHS = [(1, 1), (63, 63), (1000, 1000), (63, 257), (200, 450)]
PATTERNS = [
    ("a_shape", {"sink": 70, "window": 130}),
    ("a_shape", {"sink": 1, "window": 1}),
    ("tri_shape", {"sink": 70, "window": 130, "last": 65}),
    ("tri_shape", {"sink": 1, "window": 1, "last": 9999}),
    ("dilated", {"sink": 70, "window": 400, "dilation": 3}),
    ("dilated", {"sink": 1, "window": 9999, "dilation": 1}),
    ("strided", {"sink": 70, "window": 130, "stride": 4}),
    ("strided", {"sink": 1, "window": 9999, "stride": 2}),
]


def definition(kind: str, sizes: dict[str, Any], q_len: int, k_len: int) -> Tensor:
    """The mask (Q, K) of a pattern by its definition."""
    key, query = torch.arange(k_len), torch.arange(k_len - q_len, k_len)[:, None]
    tiles_back = query // TILE - key // TILE
    near = tiles_back <= -(-(sizes["window"] - 1) // TILE)
    if kind == "dilated":
        near &= tiles_back % sizes["dilation"] == 0
    if kind == "strided":
        near |= tiles_back % sizes["stride"] == 0
    mask = near | (key < max(sizes["sink"], TILE))
    if kind == "tri_shape":
        mask = mask | (query // TILE >= max(k_len - sizes["last"], 0) // TILE)
    return mask & (key <= query)


@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
@pytest.mark.parametrize(
    ("kind", "sizes"), PATTERNS, ids=[f"{k} {tuple(s.values())}" for k, s in PATTERNS]
)
def test_the_index_is_the_definition(kind, sizes, q_len, k_len):
    q, k = torch.empty(2, 4, q_len, 8), torch.empty(2, 2, k_len, 8)
    index = LayerPlan([make(kind, **sizes)] * 4, 2).build(q, k)
    index.validate()
    expected = definition(kind, sizes, q_len, k_len)
    assert torch.equal(index.to_mask(), expected.expand(2, 4, -1, -1))
    # Nothing is named that is not there: native code reads by these numbers.
    for entries, most in ((index.columns, k_len), (index.diagonals, num_tiles(k_len))):
        assert bool(((entries < most) | (entries == PAD)).all())


def test_a_dense_tail_goes_with_that_of_the_pattern():
    q, k = torch.empty(1, 2, 450, 8), torch.empty(1, 1, 450, 8)
    patterns = [make("tri_shape", sink=1, window=1, last=200), make("a_shape", sink=1, window=1)]
    assert LayerPlan(patterns, 1).build(q, k).dense_tail == (200, 0)
    assert LayerPlan(patterns, 1, dense_tail=64).build(q, k).dense_tail == (200, 64)


SIZES = {"sink": 70, "window": 130, "units": 2, "representatives": 3}


def representatives(q: Tensor, k: Tensor, window: int, count: int) -> list[Tensor]:
    """Of each unit the mean of its best keys, with a loop over keys and their queries."""
    first = len(k) - len(q)
    relevance = []
    for m in range(len(k)):
        following = [
            q[j - first] for j in range(max(m + 1, first), min(m + window, len(k) - 1) + 1)
        ]
        relevance.append(torch.stack(following).mean(0) @ k[m] if following else torch.tensor(0.0))
    found = []
    for start in range(0, len(k), TILE):
        unit = torch.stack(relevance[start : start + TILE])
        found.append(k[start + unit.topk(min(count, len(unit))).indices].mean(0))
    return found


@pytest.mark.parametrize(
    ("q_len", "k_len"), [(1, 1), (63, 63), (700, 700), (1000, 1000), (200, 900), (1, 900)]
)
def test_memory_units_are_their_definition(q_len, k_len):
    torch.manual_seed(k_len + q_len)
    q, k = torch.randn(1, 4, q_len, 8), torch.randn(1, 2, k_len, 8)
    index = LayerPlan([make("memory_units", **SIZES)] * 4, 2).build(q, k)
    index.validate()
    first, near, sinks = k_len - q_len, 3, 2
    for head in range(4):
        queries, keys = q[0, head], k[0, head // 2]
        stand = representatives(queries, keys, SIZES["window"], SIZES["representatives"])
        mask = torch.zeros(q_len, k_len, dtype=torch.bool)
        for row in range(first // TILE, (k_len - 1) // TILE + 1):
            mine = [i for i in range(q_len) if (first + i) // TILE == row]
            worth = {
                u: sum(float(queries[i] @ stand[u]) for i in mine) for u in range(sinks, row - near)
            }
            chosen = sorted(worth, key=lambda u: -worth[u])[: SIZES["units"]]
            tiles = {*range(sinks), *range(max(0, row - near), row + 1), *chosen}
            for i in mine:
                for tile in tiles:
                    mask[i, tile * TILE : min((tile + 1) * TILE, first + i + 1)] = True
        torch.testing.assert_close(index.to_mask()[0, head], mask)


def test_heads_of_unlike_sizes_stand_together_and_a_sliding_window_bounds_the_choice():
    torch.manual_seed(1)
    q, k = torch.randn(2, 2, 640, 8), torch.randn(2, 1, 640, 8)
    patterns = [MemoryUnits(sink=1, window=1, units=1), MemoryUnits(sink=65, window=200, units=9)]
    index = LayerPlan(patterns, 1).build(q, k)
    index.validate()
    assert index.listed()[0, 0].ne(PAD).sum(-1).tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert index.listed()[0, 1].ne(PAD).sum(-1).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3]
    near = LayerPlan([MemoryUnits(sink=1, window=1, units=9)] * 2, 1).build(q, k, window=129)
    rows = near.listed()[0, 0].tolist()
    assert all(at - tile <= 2 for at, row in enumerate(rows) for tile in row if tile != PAD)
