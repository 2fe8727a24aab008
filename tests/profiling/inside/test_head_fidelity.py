"""Rows, fidelity and density of attention by head, against plain softmax."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import profiling.inside.attention_rows as attention_rows
from kernels.index import PAD, TILE
from kernels.patterns import LayerPlan, make
from profiling.inside.attention_rows import cover, pooled_map, rows
from profiling.inside.head_fidelity import dense_of_layer, layer_fidelity, worked_tiles
from tests.default_dtype import OTHERS, default_dtype
from tests.profiling.inside.plain import output, random_inputs, weights

LENGTH, HEADS, GROUPS = 300, 4, 2


def by_tile(whole: torch.Tensor) -> torch.Tensor:
    """Sums of the tiles of (..., S, S)."""
    padded = torch.nn.functional.pad(whole, (0, 20, 0, 20))
    return padded.unflatten(-1, (5, TILE)).unflatten(-3, (5, TILE)).sum((-1, -3))


@pytest.mark.parametrize(
    "changes", [{}, {"softcap": 6.0}, {"sinks": torch.tensor([0.0, 1.0, 4.0, -1.0])}]
)
def test_rows_and_pooled_map_equal_attention_weights(changes, monkeypatch):
    x, queries = random_inputs(LENGTH, scale=1.2, **changes), torch.tensor([0, 5, 120, 121, 299])
    attention = weights(x).float()
    whole = torch.cat([piece for _, piece in rows(x, 0, torch.arange(LENGTH))])
    monkeypatch.setattr(attention_rows, "_SCORES", 7 * LENGTH)
    torch.testing.assert_close(whole, attention[0], atol=1e-6, rtol=1e-5)
    for head in range(HEADS):
        result = torch.cat([piece for _, piece in rows(x, head, queries)])
        torch.testing.assert_close(result, attention[head, queries], atol=1e-6, rtol=1e-5)
        expected = by_tile(attention[head]) / torch.tensor([64.0, 64, 64, 64, 44])[:, None]
        torch.testing.assert_close(pooled_map(x, head, 64), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cell", [TILE, 2 * TILE])
def test_cover_is_the_fraction_of_causal_tiles_in_the_index(cell):
    x = random_inputs(LENGTH)
    patterns = [
        make("a_shape", sink=64, window=100),
        make("block_sparse", blocks=2),
        make("vertical_slash", vertical=1, slash=1),
        make("dense"),
    ]
    index = LayerPlan(patterns, GROUPS).build(x.q, x.k, scale=x.scale)
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
        result = cover(index, head, cell)
        torch.testing.assert_close(result, share / counts.clamp_min(1), atol=1e-6, rtol=1e-5)
    # Two columns of a tile that is not computed otherwise.
    assert (cover(index, 0, TILE) == 2 / TILE).any()


PLAN = LayerPlan(
    [make("a_shape", sink=64, window=64), make("dense"), make("block_sparse", blocks=2)] * 2, 2
)


@pytest.mark.parametrize("fields", [{}, {"sinks": torch.linspace(-1, 3, 6)}, {"softcap": 2.0}])
def test_layer_fidelity_equals_plain_softmax(fields):
    inputs = random_inputs(LENGTH, heads=6, scale=0.5, **fields)
    index = PLAN.build(inputs.q, inputs.k, scale=inputs.scale)
    mask = index.to_mask()[0]
    dense, exact, result = weights(inputs), output(inputs), output(inputs, mask)
    measured = layer_fidelity(inputs, PLAN)
    error = (result - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    # Of the mass on keys alone: a sink is no key.
    mass = ((dense * mask).sum(-1) / dense.sum(-1)).mean(-1)
    np.testing.assert_allclose(measured.error, error, atol=1e-4, rtol=1e-3)
    np.testing.assert_allclose(measured.recall, mass, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(torch.from_numpy(measured.density), index.density()[0])
    assert measured.recall[1] == pytest.approx(1) and measured.recall[0] < 0.95
    torch.testing.assert_close(dense_of_layer(inputs)[0][0], exact.float(), atol=1e-4, rtol=1e-3)


def test_layer_fidelity_counts_half_of_a_skipped_tile():
    inputs = random_inputs(LENGTH, heads=6, scale=0.25)
    # Keys that all queries like: the first tile holds next to everything.
    inputs.q[:, :, :, 0] = 20.0
    inputs.k[:, :, :64, 0] = 20.0
    plan = LayerPlan([make("skip_softmax", scale_factor=n) for n in (1.0, 1e-60)] * 3, 2)
    index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
    tiles = worked_tiles(inputs, index)[0]
    density = torch.from_numpy(layer_fidelity(inputs, plan).density).double()
    assert index.causal_tiles / 2 < tiles.min() < tiles.max() == index.causal_tiles
    torch.testing.assert_close(tiles.double() / index.causal_tiles, density, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_fidelity_under_another_default_dtype_is_the_same(dtype):
    inputs = random_inputs(LENGTH, heads=6, scale=0.25)
    plan = LayerPlan([make("skip_softmax", scale_factor=n) for n in (1.0, 300.0)] * 3, 2)
    index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
    expected = layer_fidelity(inputs, plan)
    tiles = worked_tiles(inputs, index)
    pooled = pooled_map(inputs, 0, 64)
    with default_dtype(dtype):
        result = layer_fidelity(inputs, plan)
        torch.testing.assert_close(worked_tiles(inputs, index), tiles, atol=0, rtol=0)
        torch.testing.assert_close(pooled_map(inputs, 0, 64), pooled, atol=0, rtol=0)
    for name in ("error", "recall", "density"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), strict=True)
