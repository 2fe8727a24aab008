"""Invariants of every index, whatever pattern, size and length it was built for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex, lists, no_lists, num_rows, num_tiles
from kernels.patterns import KINDS, LayerPlan, Pattern, make
from tests.kernels.kinds import KINDS_DRAWN, LAYER

sizes = st.one_of(st.integers(1, 8), st.integers(1, 700))
pattern = st.one_of(
    *(
        st.fixed_dictionaries(entry.drawn).map(lambda drawn, kind=kind: make(kind, **drawn))
        for kind, entry in KINDS_DRAWN.items()
    )
)
GROWING = ("sink", "window", "last", "vertical", "slash", "blocks")


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[Pattern], int, Tensor, Tensor]:
    """Patterns of a layer, KV heads, q (B, H, Q, 8), k (B, G, K, 8)."""
    k_len = draw(st.one_of(st.integers(1, 500), st.sampled_from([63, 64, 65, 128, 449])))
    q_len = draw(st.one_of(st.just(k_len), st.integers(1, k_len)))
    kv_heads, group, batch = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )
    patterns = draw(st.lists(pattern, min_size=kv_heads * group, max_size=kv_heads * group))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    q = torch.randn(batch, kv_heads * group, q_len, 8)
    return patterns, kv_heads, q, torch.randn(batch, kv_heads, k_len, 8)


def executed(index: SparseIndex, b: int, head: int, row: int) -> tuple[set[int], list[list[int]]]:
    """Key tiles and groups of key columns that a row computes, by SparseIndex's definition."""
    at = index.first_row + row
    named = [at - d for d in index.diagonals[b, head].tolist()] + index.listed()[
        b, head, row
    ].tolist()
    tiles = {t for t in named if 0 <= t <= at}
    last = index.dense_tail[head] if index.dense_tail else 0
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
@given(layers(), st.one_of(st.none(), st.integers(1, 200)), st.sampled_from([0, 1, 70]))
def test_invariants(
    layer: tuple[list[Pattern], int, Tensor, Tensor], window: int | None, tail: int
) -> None:
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

    for b in range(index.batch):
        for head in range(index.num_heads):
            count, by_hand = (
                0,
                torch.zeros(index.num_rows * TILE, num_tiles(k_len) * TILE, dtype=torch.int64),
            )
            for row in range(index.num_rows):
                tiles, groups = executed(index, b, head, row)
                count += len(tiles) + len(groups)
                for tile in tiles:
                    by_hand[row * TILE : (row + 1) * TILE, tile * TILE : (tile + 1) * TILE] += 1
                for group in groups:
                    by_hand[row * TILE : (row + 1) * TILE, group] += 1
            assert by_hand.max() == 1, "a key computed twice"
            skip = offset % TILE
            by_hand = by_hand[skip : skip + q_len, :k_len].bool() & causal
            assert torch.equal(mask[b, head], by_hand)
            assert computed[b, head] == count
    assert torch.equal(index.flops(16, 48), computed * 2 * TILE * TILE * (16 + 48))
    assert torch.equal(index.flops(16), index.flops(16, 16))


@settings(max_examples=30, deadline=None)
@given(layers(), st.one_of(st.none(), st.integers(1, 200)), st.integers(1, 9))
def test_density_of_some_rows(
    layer: tuple[list[Pattern], int, Tensor, Tensor], window: int | None, most: int
) -> None:
    patterns, kv_heads, q, k = layer
    index = LayerPlan(patterns, kv_heads, dense_tail=30).build(q, k, window=window)
    every = -(-index.num_rows // most)
    rows = range(every // 2, index.num_rows, every)
    assert 1 <= len(rows) <= most
    dense = LayerPlan([make("dense")] * len(patterns), kv_heads).build(q, k, window=window)
    for b in range(index.batch):
        for head in range(index.num_heads):
            found = [executed(index, b, head, row) for row in rows]
            count = sum(len(tiles) + len(groups) for tiles, groups in found)
            all_tiles = sum(len(executed(dense, b, head, row)[0]) for row in rows)
            assert index.density(most)[b, head] == pytest.approx(count / all_tiles)
    assert torch.equal(index.density(index.num_rows), index.density())


@settings(max_examples=30, deadline=None)
@given(layers())
def test_a_head_is_built_alike_in_any_company(
    layer: tuple[list[Pattern], int, Tensor, Tensor],
) -> None:
    patterns, kv_heads, q, k = layer
    together = LayerPlan(patterns, kv_heads).build(q, k)
    group = len(patterns) // kv_heads
    for head, alone in enumerate(patterns):
        one = slice(head // group, head // group + 1)
        index = LayerPlan([alone], 1).build(q[:, head : head + 1], k[:, one])
        assert torch.equal(index.to_mask()[:, 0], together.to_mask()[:, head])
        assert torch.equal(index.computed_tiles()[:, 0], together.computed_tiles()[:, head])


@settings(max_examples=25, deadline=None)
@given(layers(), st.data())
def test_more_budget_never_takes_a_key_away(
    layer: tuple[list[Pattern], int, Tensor, Tensor], data: st.DataObject
) -> None:
    patterns, kv_heads, q, k = layer
    # The window of memory units is what chooses their representatives: a larger one may look up
    # other units.
    grows = [set(GROWING) - ({"window"} if p.kind == "memory_units" else set()) for p in patterns]
    larger = [
        replace(
            p,
            **{f.name: getattr(p, f.name) + data.draw(sizes) for f in fields(p) if f.name in names},
        )
        for p, names in zip(patterns, grows, strict=True)
    ]
    less = LayerPlan(patterns, kv_heads).build(q, k)
    more = LayerPlan(larger, kv_heads).build(q, k)
    assert not (less.to_mask() & ~more.to_mask()).any()


@settings(max_examples=25, deadline=None)
@given(layers())
def test_static_patterns_do_not_know_about_chunks(
    layer: tuple[list[Pattern], int, Tensor, Tensor],
) -> None:
    _, kv_heads, q, k = layer
    fixed = [
        make("a_shape", sink=100, window=70),
        make("tri_shape", sink=1, window=1, last=70),
        make("dilated", sink=1, window=300, dilation=2),
        make("strided", sink=1, window=70, stride=3),
        make("static", columns=(70, 200), diagonals=(0, 3)),
        make("dense"),
    ]
    patterns = [fixed[i % len(fixed)] for i in range(q.shape[1])]
    plan = LayerPlan(patterns, kv_heads)
    whole = plan.build(torch.zeros(*q.shape[:2], k.shape[2], 8), k).to_mask()
    assert torch.equal(plan.build(q, k).to_mask(), whole[:, :, k.shape[2] - q.shape[2] :])


def test_counting_in_chunks_is_counting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 700, 8), torch.randn(2, 1, 900, 8)
    index = LayerPlan([make(kind, **size) for kind, size in SOME], 1).build(q, k)
    mask, computed = index.to_mask(), index.computed_tiles()
    monkeypatch.setattr("kernels.index._SCRATCH", 1)
    assert torch.equal(index.to_mask(), mask) and torch.equal(index.computed_tiles(), computed)


SOME: list[tuple[str, dict[str, int]]] = [
    ("vertical_slash", {"vertical": 200, "slash": 130}),
    ("block_sparse", {"blocks": 4}),
    ("a_shape", {"sink": 100, "window": 90}),
]


def test_a_long_prompt_costs_kilobytes_a_head() -> None:
    """1,000 verticals and slashes in 95 tiles: nothing that is stored grows with the rows."""
    length = 1 << 18
    index = SparseIndex(
        q_len=length,
        k_len=length,
        diagonals=torch.arange(95, dtype=torch.int32)[None, None],
        **no_lists(1, 1, num_rows(length, length), device=torch.device("cpu")),
        columns=torch.arange(0, 1000 * 251, 251, dtype=torch.int32)[None, None],
    )
    index.validate()
    assert index.nbytes == 4 * 1095
    # Every row computes its slashes; a group of columns costs a tile once its first column lies
    # before them.
    rows = index.num_rows
    slashes = sum(min(row + 1, 95) for row in range(rows))
    groups = sum(max(0, rows - (251 * g + 95)) for g in range(16))
    assert abs(int(index.computed_tiles()) - slashes - groups) <= 16


def test_a_head_takes_what_its_own_rows_list() -> None:
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
        index.listed()[:, 1:7].eq(PAD).all()
        and index.listed(slice(-1, None))[:, 7].ne(PAD).sum() == 2 * 2
    )
    one = index.sequence(1)
    assert torch.equal(one.to_mask()[0], index.to_mask()[1])


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
    ],
)
def test_validate_names_what_is_wrong(change: dict[str, object], message: str) -> None:
    index = LayerPlan([make("dense")] * 2, 1).build(
        torch.zeros(1, 2, 130, 4), torch.zeros(1, 1, 130, 4)
    )
    with pytest.raises(ValueError, match=message):
        replace(index, **change).validate()  # type: ignore[arg-type]


def test_every_kind_is_in_the_tables() -> None:
    assert set(KINDS_DRAWN) == {pattern.kind for pattern in LAYER} == set(KINDS)


@pytest.mark.parametrize(("q_len", "k_len"), [(300, 300), (257, 700), (10, 130)])
@pytest.mark.parametrize("queries", [1, 65, 1000])
def test_a_dense_tail_sees_every_key_and_changes_no_other_row(
    q_len: int, k_len: int, queries: int
) -> None:
    q, k = torch.randn(1, 3, q_len, 16), torch.randn(1, 1, k_len, 16)
    patterns = [make(kind, **size) for kind, size in SOME]
    without = LayerPlan(patterns, 1).build(q, k)
    index = LayerPlan(patterns, 1, dense_tail=queries).build(q, k)
    index.validate()
    causal = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
    first = max(0, ((k_len - min(queries, q_len)) // 64) * 64 - (k_len - q_len))
    expected = without.to_mask().clone()
    expected[:, :, first:] = causal[first:]
    assert torch.equal(index.to_mask(), expected)
    assert (index.computed_tiles() >= without.computed_tiles()).all()
