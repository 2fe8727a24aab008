"""NaN and infinity in what builders read: valid indices, other heads and sequences unharmed.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.index import PAD, SparseIndex, num_tiles
from kernels.patterns import LayerPlan, make
from tests.kernels.kinds import LAYER

NAN, INF = float("nan"), float("inf")
# Which rows of queries and of keys are bad, and how.
PLACES = {
    "last query": (slice(-1, None), slice(0), NAN),
    "all queries": (slice(None), slice(0), NAN),
    "a key in the middle": (slice(0), slice(200, 201), NAN),
    "a tile of keys": (slice(0), slice(128, 192), NAN),
    "everything": (slice(None), slice(None), NAN),
    "infinite queries": (slice(-3, None), slice(0), INF),
    "infinite keys": (slice(0), slice(100, 300), -INF),
}


def check_entries(index: SparseIndex) -> None:
    """Valid, and nothing named that is not there: native code reads by these numbers."""
    index.validate()
    for entries, most in (
        (index.columns, index.k_len),
        (index.tiles, num_tiles(index.k_len)),
        (index.diagonals, num_tiles(index.k_len)),
    ):
        assert bool(((entries < most) | (entries == PAD)).all())


def same(one: SparseIndex, other: SparseIndex) -> Tensor:
    """(B, H): whether the masks are the same."""
    return (one.to_mask() == other.to_mask()).all(dim=(2, 3))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 150)])
@pytest.mark.usefixtures("builder")
def test_bad_numbers_stay_where_they_are(place, dtype, window):
    queries, keys, bad = PLACES[place]
    torch.manual_seed(0)
    heads = len(LAYER)
    q = torch.randn(2, heads, 330, 32).to(dtype)
    k = torch.randn(2, heads // 2, 401, 32).to(dtype)
    plan = LayerPlan(LAYER, heads // 2, dense_tail=30)
    clean = plan.build(q, k, window=window)
    # In the first sequence all heads, in the second those of one KV head.
    touched = torch.zeros(2, heads, dtype=torch.bool)
    touched[0], touched[1, 4:6] = True, True
    q[0, :, queries], k[0, :, keys] = bad, bad
    q[1, 4:6, queries], k[1, 2, keys] = bad, bad
    index = plan.build(q, k, window=window)
    check_entries(index)
    assert bool(same(index, clean)[~touched].all())


@pytest.mark.parametrize("kind", ["vertical_slash", "block_sparse"])
@pytest.mark.parametrize("coverage", [None, 0.5, 1.0])
@pytest.mark.usefixtures("builder")
def test_sizes_hold_whatever_the_scores(kind, coverage):
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 2000, 16), torch.randn(1, 1, 2000, 16)
    q[torch.rand(q.shape) < 0.01], k[torch.rand(k.shape) < 0.01] = NAN, INF
    sizes = {"blocks": 5} if kind == "block_sparse" else {"vertical": 100, "slash": 80}
    index = LayerPlan([make(kind, **sizes, coverage=coverage)] * 2, 1).build(q, k)
    check_entries(index)
    assert (
        index.listed().shape[-1] <= 4
        and index.columns.shape[-1] <= 100
        and index.diagonals.shape[-1] <= 160
    )
