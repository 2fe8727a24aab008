"""Conformance of builders: what holds for every index, of any kinds, sizes, lengths and values.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex, num_tiles
from kernels.patterns import LayerPlan, Pattern, make
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged
from tests.conformance import builder_cases
from tests.conformance.builder_cases import Build, paged
from tests.kernels.conftest import builder, one_thread, poisoned_memory
from tests.kernels.kinds import KINDS_DRAWN, LAYER

__all__ = ["builder", "one_thread", "poisoned_memory"]


def check_entries(index: SparseIndex) -> None:
    """Valid, and nothing named that is not there: native code reads by these numbers."""
    index.validate()
    for entries, most in (
        (index.columns, index.k_len),
        (index.tiles, num_tiles(index.k_len)),
        (index.diagonals, num_tiles(index.k_len)),
    ):
        assert bool(((entries < most) | (entries == PAD)).all())


pattern = st.one_of(
    *(
        st.fixed_dictionaries(entry.drawn).map(lambda drawn, kind=kind: make(kind, **drawn))
        for kind, entry in KINDS_DRAWN.items()
    )
)


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[Pattern], int, Tensor, Tensor]:
    """Patterns of a layer, KV heads, q (B, H, Q, 8), k (B, G, K, 8)."""
    k_len = draw(st.one_of(st.integers(1, 500), st.sampled_from([63, 64, 65, 128, 449])))
    q_len = draw(st.one_of(st.just(k_len), st.integers(1, k_len)))
    kv_heads, group, batch = (draw(st.integers(1, most)) for most in (2, 3, 2))
    patterns = draw(st.lists(pattern, min_size=kv_heads * group, max_size=kv_heads * group))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    q = torch.randn(batch, kv_heads * group, q_len, 8)
    return patterns, kv_heads, q, torch.randn(batch, kv_heads, k_len, 8)


def executed(index: SparseIndex, b: int, head: int, row: int) -> tuple[set[int], list[list[int]]]:
    """Key tiles and groups of key columns that a row computes, by SparseIndex's definition."""
    at = index.first_row + row
    named = [at - d for d in index.diagonals[b, head].tolist()] + index.padded_tiles()[
        b, head, row
    ].tolist()
    tiles = {t for t in named if 0 <= t <= at}
    last = index.dense_tail
    if last and at >= max(index.k_len - last, 0) // TILE:
        tiles = set(range(at + 1))
    near = at - (-(-(index.window - 1) // TILE) if index.window else at)
    tiles = {t for t in tiles if t >= near}
    columns = index.columns[b, head].tolist()
    groups = [columns[i : i + TILE] for i in range(0, len(columns), TILE)]
    live = [
        [c for c in group if near <= c // TILE < at and c // TILE not in tiles] for group in groups
    ]
    return tiles, [group for group in live if group]


@settings(max_examples=60, deadline=None)
@given(
    layers(),
    st.one_of(st.none(), st.integers(1, 200)),
    st.sampled_from([0, 1, 70, 1000]),
    st.integers(1, 9),
)
def test_index_invariants_hold(layer, window, tail, most):
    patterns, kv_heads, q, k = layer
    index = LayerPlan(patterns, kv_heads, dense_tail=tail).build(q, k, window=window)
    check_entries(index)
    q_len, k_len = q.shape[2], k.shape[2]
    offset = k_len - q_len
    mask, computed = index.to_mask(), index.computed_tiles()
    assert mask.shape == (*q.shape[:3], k_len)
    assert index.diagonals.dtype == index.tiles.dtype == index.columns.dtype == torch.int32

    positions = torch.arange(k_len)
    distance = positions[offset:, None] - positions
    causal = (distance >= 0) & (distance < (window or k_len))
    assert not (mask & ~causal).any(), "a key beyond the causal limit or the window"
    assert mask[:, :, torch.arange(q_len), positions[offset:]].all(), (
        "a query that does not see itself"
    )
    if window is None:
        assert (mask[..., :TILE] == causal[:, :TILE]).all(), (
            "a query that does not see the whole first tile"
        )
    without = LayerPlan(patterns, kv_heads).build(q, k, window=window).to_mask()
    first = max(k_len - tail, 0) // TILE * TILE - offset if tail else q_len
    first = max(first, 0)
    assert (mask[:, :, first:] == causal[first:]).all(), "a tail that is not"
    assert torch.equal(mask[:, :, :first], without[:, :, :first]), "a tail that changes other rows"

    dense = LayerPlan([make("dense")] * len(patterns), kv_heads).build(q, k, window=window)
    every = -(-index.num_rows // most)
    some = range(every // 2, index.num_rows, every)
    for b in range(index.batch):
        for head in range(index.num_heads):
            counts = []
            by_hand = torch.zeros(index.num_rows * TILE, num_tiles(k_len) * TILE, dtype=torch.int64)
            for row in range(index.num_rows):
                tiles, groups = executed(index, b, head, row)
                counts.append(len(tiles) + len(groups))
                for tile in tiles:
                    by_hand[row * TILE : (row + 1) * TILE, tile * TILE : (tile + 1) * TILE] += 1
                for group in groups:
                    by_hand[row * TILE : (row + 1) * TILE, group] += 1
            assert by_hand.max() == 1, "a key computed twice"
            skip = offset % TILE
            by_hand = by_hand[skip : skip + q_len, :k_len].bool() & causal
            assert torch.equal(mask[b, head], by_hand)
            assert computed[b, head] == sum(counts)
            all_tiles = sum(len(executed(dense, b, head, row)[0]) for row in some)
            density = sum(counts[row] for row in some) / all_tiles
            assert index.density(most)[b, head] == pytest.approx(density)
    assert torch.equal(index.density(index.num_rows), index.density())
    assert torch.equal(index.flops(16, 48), computed * 2 * TILE * TILE * (16 + 48))
    assert torch.equal(index.flops(16), index.flops(16, 16))


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("name", builder_cases.PAGED)
@pytest.mark.parametrize("cut", [False, True])
def test_paged_keys_equal_contiguous_keys(name, cut, monkeypatch):
    """Read whole, and cut up: keys 128 at a time, little memory for scratch."""
    if cut:
        monkeypatch.setattr("kernels.patterns.paged._AT_ONCE", 128)
        monkeypatch.setattr("kernels.patterns.block_sparse._SCRATCH_BYTES", {"cpu": 1})
    assert not any(
        builder_cases.differences(builder_cases.PAGED[name], torch.device("cpu")).values()
    )


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


def test_ragged_index_counts_tiles_by_sequence():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 300, 64), torch.randn(2, 1, 300, 64)
    plan = LayerPlan([make("a_shape", sink=64, window=64), make("dense")], 1)
    index = plan.build(q, k, ragged=Ragged.left_padded([300, 150], 300, 300))
    each = [index.sequence(0), index.sequence(1)]
    assert torch.equal(index.computed_tiles(), torch.cat([one.computed_tiles() for one in each]))
    assert torch.equal(index.density(), torch.cat([one.density() for one in each]))
    assert index.density()[:, 1].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"index\.sequence"):
        _ = index.causal_tiles


def test_index_rejects_entries_that_are_no_dense_tensor():
    index = dense_index(1, 1, 64, 64, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"columns must be a dense tensor, got .*sparse"):
        replace(index, columns=index.columns.to_sparse()).check_shapes()
