"""A-shapes against masks written down from their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.index import PAD, TILE, num_tiles
from kernels.patterns import LayerPlan, make

LENGTHS = [(1, 1), (63, 63), (1000, 1000), (63, 257), (200, 450)]
SIZES = [(70, 130), (1, 1), (1, 9999), (9999, 1)]


def definition(sink: int, window: int, q_len: int, k_len: int) -> Tensor:
    """The mask (Q, K) of an A-shape by its definition."""
    key, query = torch.arange(k_len), torch.arange(k_len - q_len, k_len)[:, None]
    tiles_back = query // TILE - key // TILE
    near = tiles_back <= -(-(window - 1) // TILE)
    return (near | (key < max(sink, TILE))) & (key <= query)


@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
@pytest.mark.parametrize(("sink", "window"), SIZES)
def test_a_shape_index_equals_definition(sink, window, q_len, k_len):
    q, k = torch.empty(2, 4, q_len, 8), torch.empty(2, 2, k_len, 8)
    index = LayerPlan([make("a_shape", sink=sink, window=window)] * 4, 2).build(q, k)
    index.validate()
    expected = definition(sink, window, q_len, k_len)
    assert torch.equal(index.to_mask(), expected.expand(2, 4, -1, -1))
    # Nothing is named that is not there: native code reads by these numbers.
    for entries, most in ((index.columns, k_len), (index.diagonals, num_tiles(k_len))):
        assert bool(((entries < most) | (entries == PAD)).all())
