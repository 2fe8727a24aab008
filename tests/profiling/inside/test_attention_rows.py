"""Rows of attention for pictures, against a full attention matrix on a small case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import profiling.inside.attention_rows as attention_rows
from kernels.index import PAD, TILE, SparseIndex
from kernels.patterns import LayerPlan, make
from profiling.inside.attention_rows import NEGLIGIBLE, cover, pooled_map, rows, sparsity_of
from tests.profiling.inside.plain import random_inputs, weights

LENGTH, HEADS, GROUPS = 300, 4, 2


def by_tile(whole: torch.Tensor) -> torch.Tensor:
    """Sums of the tiles of (..., S, S)."""
    padded = torch.nn.functional.pad(whole, (0, 20, 0, 20))
    return padded.unflatten(-1, (5, TILE)).unflatten(-3, (5, TILE)).sum((-1, -3))


@pytest.mark.parametrize(
    "changes", [{}, {"softcap": 6.0}, {"sinks": torch.tensor([0.0, 1.0, 4.0, -1.0])}]
)
def test_rows_and_what_is_made_of_them(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, queries = random_inputs(LENGTH, scale=1.2, **changes), torch.tensor([0, 5, 120, 121, 299])
    attention = weights(x).float()
    whole = torch.cat([piece for _, piece in rows(x, 0, torch.arange(LENGTH))])
    monkeypatch.setattr(attention_rows, "_SCORES", 7 * LENGTH)
    torch.testing.assert_close(whole, attention[0], atol=1e-6, rtol=1e-5)
    for head in range(HEADS):
        found = torch.cat([piece for _, piece in rows(x, head, queries)])
        torch.testing.assert_close(found, attention[head, queries], atol=1e-6, rtol=1e-5)
        expected = by_tile(attention[head]) / torch.tensor([64.0, 64, 64, 64, 44])[:, None]
        torch.testing.assert_close(pooled_map(x, head, 64), expected, atol=1e-6, rtol=1e-5)
    sparsity = sparsity_of(x, queries)
    for head in range(HEADS):
        seen = [attention[head, query, : query + 1] for query in queries.tolist()]
        small = sum(int((row < NEGLIGIBLE * row.max()).sum()) for row in seen)
        assert sparsity[head].item() == pytest.approx(small / sum(map(len, seen)))
    assert sparsity.min() > 0.02 and sparsity.max() < 0.98


@pytest.mark.parametrize("cell", [TILE, 2 * TILE])
def test_cover_is_the_share_of_the_causal_tiles_that_an_index_names(cell: int) -> None:
    x = random_inputs(LENGTH)
    patterns = [
        make("a_shape", sink=64, window=100),
        make("block_sparse", blocks=2),
        make("vertical_slash", vertical=1, slash=1),
        make("dense"),
    ]
    index: SparseIndex = LayerPlan(patterns, GROUPS).build(x.q, x.k, scale=x.scale)
    columns = torch.tensor([3, 70, 71, 130, PAD], dtype=torch.int32).expand(1, HEADS, 5)
    index = replace(index, columns=columns)
    size = -(-LENGTH // cell)
    # The mask marks keys; outside the columns' share a tile is all or nothing, where it is causal.
    mask, could = by_tile(index.to_mask()[0].float()), by_tile(torch.ones(LENGTH, LENGTH).tril())
    for head in range(HEADS):
        share = torch.zeros(size, size)
        counts = torch.zeros(size, size)
        for row in range(5):
            for key in range(row + 1):
                at = row * TILE // cell, key * TILE // cell
                share[at] += mask[head, row, key] / could[row, key]
                counts[at] += 1
        found = cover(index, head, cell)
        torch.testing.assert_close(found, share / counts.clamp_min(1), atol=1e-6, rtol=1e-5)
    # Two columns of a tile that is not computed otherwise.
    assert (cover(index, 0, TILE) == 2 / TILE).any()
