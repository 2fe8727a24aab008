"""Builders read keys where they lie: the same bits from pages as from a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.index import PAD, SparseIndex, num_tiles
from kernels.patterns import LayerPlan, make
from kernels.ragged import Ragged
from tests.conformance.builder_cases import Build, paged
from tests.kernels.kinds import LAYER


@pytest.mark.usefixtures("builder")
def test_paged_build_of_different_lengths_uses_pages_per_sequence():
    torch.manual_seed(0)
    lengths = ((70, 200), (1, 65), (130, 130))
    parts = [torch.randn(1, 2, k_len, 16, dtype=torch.float16) for _, k_len in lengths]
    q = torch.randn(1, 14, sum(q_len for q_len, _ in lengths), 16, dtype=torch.float16)
    whole = torch.full((3, 2, 200, 16), float("nan"), dtype=torch.float16)
    for row, part in enumerate(parts):
        whole[row, :, : part.shape[2]] = part
    where = paged(whole, Build(q_len=1, k_len=200, page=48))
    starts = [0, 70, 71]
    apart = Ragged.from_sequences(
        (0, start, *each[:1], 0, each[1]) for start, each in zip(starts, lengths, strict=True)
    )
    ends = [0, 200, 265]
    packed = Ragged.from_sequences(
        (0, s, each[0], e, each[1]) for s, e, each in zip(starts, ends, lengths, strict=True)
    )
    plan = LayerPlan(LAYER, 2, dense_tail=5)
    index = plan.build(q, where.cache, ragged=apart, block_table=where.table)
    expected = plan.build(q, torch.cat(parts, dim=2), ragged=packed)
    for name in ("diagonals", "tiles", "offsets", "columns"):
        assert torch.equal(getattr(index, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_len": None}, "does not say how many keys there are: k_len does, or ragged"),
        ({"k_len": 129}, r"int32 \(1, at least 3\), got torch.int32 \(1, 2\)"),
        ({"block_table": torch.zeros(1, 2)}, r"int32 \(1, at least 2\), got torch.float32"),
        ({"k": torch.zeros(3, 0, 2, 8)}, "a page must have at least one token"),
        ({"k": torch.zeros(3, 64, 2, 16)[..., ::2]}, "last dimension .* must be contiguous"),
        ({"k": torch.zeros(3, 64, 2, 8).half()}, "torch.float32, or of 8 bits, got torch"),
        ({"k": torch.zeros(3, 64, 4, 8)}, "for 4 query and 2 KV heads, got 4 and 4"),
        ({"k": torch.zeros(3, 64, 2, 4)}, "q and k must share batch and head dim"),
    ],
)
def test_paged_build_rejects_inconsistent_pages(change, message):
    arguments = {
        "k": torch.zeros(3, 64, 2, 8),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "k_len": 128,
    } | change
    with pytest.raises(ValueError, match=message):
        LayerPlan([make("vertical_slash", vertical=1, slash=1)] * 4, 2).build(
            torch.zeros(1, 4, 5, 8), **arguments
        )


def test_paged_build_error_names_invalid_page():
    plan = LayerPlan([make("block_sparse", blocks=2)], 1)
    table = torch.tensor([[0, 7]], dtype=torch.int32)
    with pytest.raises((ValueError, IndexError), match="7"):
        plan.build(torch.zeros(1, 1, 5, 8), torch.zeros(3, 64, 1, 8), block_table=table, k_len=100)


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


def same(first: SparseIndex, second: SparseIndex) -> Tensor:
    """(B, H): whether the masks are the same."""
    return (first.to_mask() == second.to_mask()).all(dim=(2, 3))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 150)])
@pytest.mark.usefixtures("builder")
def test_non_finite_values_affect_only_their_head(place, dtype, window):
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
def test_index_sizes_hold_for_any_scores(kind, coverage):
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 2000, 16), torch.randn(1, 1, 2000, 16)
    q[torch.rand(q.shape) < 0.01], k[torch.rand(k.shape) < 0.01] = NAN, INF
    sizes = {"blocks": 5} if kind == "block_sparse" else {"vertical": 100, "slash": 80}
    index = LayerPlan([make(kind, **sizes, coverage=coverage)] * 2, 1).build(q, k)
    check_entries(index)
    assert (
        index.padded_tiles().shape[-1] <= 4
        and index.columns.shape[-1] <= 100
        and index.diagonals.shape[-1] <= 160
    )
