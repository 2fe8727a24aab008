"""Invariants of every index, whatever pattern, size and length it was built for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex, lists, num_tiles
from kernels.patterns import KINDS, LayerPlan, Pattern, make
from kernels.ragged import Ragged
from tests.kernels.kinds import KINDS_DRAWN, LAYER

sizes = st.one_of(st.integers(1, 8), st.integers(1, 700))
pattern = st.one_of(
    *(
        st.fixed_dictionaries(entry.drawn).map(lambda drawn, kind=kind: make(kind, **drawn))
        for kind, entry in KINDS_DRAWN.items()
    )
)
GROWING = ("sink", "window", "vertical", "slash", "blocks")


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
    index.validate()
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


@settings(max_examples=30, deadline=None)
@given(layers())
def test_index_of_head_is_independent_of_other_heads(layer):
    patterns, kv_heads, q, k = layer
    together = LayerPlan(patterns, kv_heads).build(q, k)
    group = len(patterns) // kv_heads
    for head, alone in enumerate(patterns):
        group_slice = slice(head // group, head // group + 1)
        index = LayerPlan([alone], 1).build(q[:, head : head + 1], k[:, group_slice])
        assert torch.equal(index.to_mask()[:, 0], together.to_mask()[:, head])
        assert torch.equal(index.computed_tiles()[:, 0], together.computed_tiles()[:, head])


@settings(max_examples=25, deadline=None)
@given(layers(), st.data())
def test_larger_budget_never_removes_a_key(layer, data):
    patterns, kv_heads, q, k = layer
    larger = [
        replace(
            p,
            **{
                f.name: getattr(p, f.name) + data.draw(sizes)
                for f in fields(p)
                if f.name in GROWING
            },
        )
        for p in patterns
    ]
    less = LayerPlan(patterns, kv_heads).build(q, k)
    more = LayerPlan(larger, kv_heads).build(q, k)
    assert not (less.to_mask() & ~more.to_mask()).any()


def test_count_in_chunks_equals_count_at_once(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 700, 8), torch.randn(2, 1, 900, 8)
    patterns = [
        make("vertical_slash", vertical=200, slash=130),
        make("block_sparse", blocks=4),
        make("a_shape", sink=100, window=90),
    ]
    index = LayerPlan(patterns, 1).build(q, k)
    mask, computed = index.to_mask(), index.computed_tiles()
    monkeypatch.setattr("kernels.index._SCRATCH", 1)
    assert torch.equal(index.to_mask(), mask) and torch.equal(index.computed_tiles(), computed)


def test_head_attends_to_keys_in_its_rows():
    patterns = [
        make("block_sparse", blocks=20),
        *[make("a_shape", sink=64, window=64)] * 6,
        make("block_sparse", blocks=3),
    ]
    q, k = torch.randn(2, 8, 3000, 4), torch.randn(2, 2, 3200, 4)
    index = LayerPlan(patterns, 2).build(q, k)
    tiles = range(index.first_row, 50)
    assert len(index.tiles) == 2 * sum(min(19, at) + min(2, at) for at in tiles)
    assert (
        index.padded_tiles()[:, 1:7].eq(PAD).all()
        and index.padded_tiles(slice(-1, None))[:, 7].ne(PAD).sum() == 2 * 2
    )
    single = index.sequence(1)
    assert torch.equal(single.to_mask()[0], index.to_mask()[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_len": 0}, "between 1 and k_len=130, got 0"),
        ({"q_len": 131}, "between 1 and k_len=130, got 131"),
        ({"columns": torch.zeros(1, 2, 1)}, "columns must be int32, got torch.float32"),
        ({"columns": torch.zeros(2, 2, 0, dtype=torch.int32)}, "columns must be"),
        ({"columns": torch.zeros(1, 2, 0, dtype=torch.int32, device="meta")}, "on cpu, got meta"),
        ({"columns": torch.tensor([[[-1], [3]]]).int()}, "must not be negative, got -1"),
        ({"columns": torch.tensor([[[3, 3], [3, 4]]]).int()}, "columns must be strictly ascending"),
        ({"diagonals": torch.tensor([[[0, PAD], [1, 2]]]).int()}, "must compute diagonal 0"),
        ({"diagonals": torch.tensor([[[PAD, 0], [0, 2]]]).int()}, "diagonals must be strictly"),
        ({"tiles": torch.zeros(1, 2, 3, 1).int()}, r"tiles must be \(any width\)"),
        ({"offsets": torch.zeros(1, 2, 5).long()}, r"offsets must be \(1, 2, 4\)"),
        ({"offsets": torch.zeros(1, 2, 4).int()}, "offsets must be int64"),
        ({"offsets": torch.ones(1, 2, 4).long()}, "ascending from 0 to at most 0"),
        (lists(torch.tensor([3, 3]).int().expand(1, 2, 3, 2)), "tiles must be strictly ascending"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"dense_tail": -1}, "dense_tail must be a number of queries, got -1"),
        ({"dense_tail": 1.5}, "dense_tail must be a number of queries, got 1.5"),
        ({"skip": torch.full((1, 2), 0.5)}, "skip must be at most 0, got 0.5"),
        ({"skip": torch.zeros(1, 3)}, r"skip must be float32 \(1, 2\) .* \(1, 3\)"),
        (
            {"ragged": Ragged.left_padded([130, 100], 130, 130)},
            r"for 1 sequences of up to \(130, 130\) .*, its ragged batch has 2",
        ),
        ({"ragged": Ragged.left_padded([100], 130, 130)}, r"has 1 of up to \(100, 100\)"),
    ],
)
def test_validate_error_names_the_fault(change, message):
    index = LayerPlan([make("dense")] * 2, 1).build(
        torch.zeros(1, 2, 130, 4), torch.zeros(1, 1, 130, 4)
    )
    with pytest.raises(ValueError, match=message):
        replace(index, **change).validate()


def test_tables_contain_every_kind():
    assert set(KINDS_DRAWN) == {pattern.kind for pattern in LAYER} == set(KINDS)
