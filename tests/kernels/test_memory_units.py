"""Memory units against their definition, computed query by query and key by key."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.index import PAD, TILE
from kernels.patterns import LayerPlan, MemoryUnits, make
from tests.kernels.operations import Operations

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
def test_the_index_is_the_definition(q_len, k_len):
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


def test_more_heads_take_no_more_operations():
    """Heads of one size go together; those of another size are as many operations again."""
    counts = []
    for heads in (2, 8):
        q, k = torch.randn(1, heads, 300, 8), torch.randn(1, 2, 300, 8)
        plan = LayerPlan([make("memory_units", **SIZES)] * heads, 2)
        plan.build(q, k)
        with Operations() as operations:
            plan.build(q, k)
        counts.append(operations.counts.torch)
    assert counts[0] == counts[1]


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
