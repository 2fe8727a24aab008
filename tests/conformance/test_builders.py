"""Conformance of builders, native and in torch: what each pattern selects, by its definition.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.index import PAD, TILE
from kernels.patterns import LayerPlan, block_sparse, make
from kernels.patterns.last_queries import EstimateCall
from kernels.topk import TopKCall, best
from tests.kernels.conftest import builder, one_thread, poisoned_memory

__all__ = ["builder", "one_thread", "poisoned_memory"]
# Queries, keys, and the window.
LENGTHS = [
    *((1, 1, None), (63, 63, None), (1000, 1000, None), (1, 300, None), (200, 450, None)),
    *((65, 65, 1), (63, 257, 65), (200, 450, 130), (200, 450, 10_000)),
]
COVERAGES = (None, 0.5, 1.0)


def problem(q_len: int, k_len: int, *, heads: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(q_len * 1000 + k_len)
    return torch.randn(2, heads, q_len, 16) * 2, torch.randn(2, 2, k_len, 16)


def kept(entries: Tensor) -> set[int]:
    return {int(i) for i in entries if i != PAD}


def smallest(mass: Sequence[float], share: float | None, size: int, forced: int) -> set[int]:
    """Select forced entries, then the heaviest, until the coverage or the size is reached.

    A coverage of 1.0 needs every entry with nonzero mass.
    """
    rest = sorted(range(min(forced, len(mass)), len(mass)), key=lambda i: (-mass[i], i))
    order = [*range(min(forced, len(mass))), *rest]
    selected = []
    for place in order[:size]:
        enough = (
            share is not None and share < 1 and sum(mass[i] for i in selected) >= share * sum(mass)
        )
        if place >= forced and (enough or (share is not None and mass[place] == 0)):
            break
        selected.append(place)
    return set(selected)


def masses(
    q: Tensor, k: Tensor, last: int, window: int | None, scale: float = 0.25
) -> tuple[Tensor, Tensor]:
    """Mass by column and by distance from the last queries, (B, H, K) fp64."""
    keys, k_len = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1), k.shape[2]
    last = min(last, q.shape[2])
    distance = torch.arange(k_len - last, k_len)[:, None] - torch.arange(k_len)
    logits = q[:, :, -last:].double() @ keys.transpose(2, 3) * scale
    unseen = (distance < 0) | (distance >= (window or k_len))
    weights = logits.masked_fill(unseen, float("-inf")).softmax(-1)
    slash = torch.zeros(*weights.shape[:2], k_len, dtype=torch.float64)
    slash.scatter_add_(
        2, distance.clamp_min(0).flatten().expand(*weights.shape[:2], -1), weights.flatten(2)
    )
    return weights.sum(2), slash


def csr_offsets(distances: set[int], k_len: int) -> set[int]:
    """Tile diagonals in which these distances lie, two for each that is no whole number of them."""
    offsets = {offset for s in distances for offset in (s // TILE, -(-s // TILE))}
    return {offset for offset in offsets if offset < -(-k_len // TILE)}


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(("q_len", "k_len", "window"), LENGTHS)
def test_vertical_slash_selects_fewest_for_coverage(q_len, k_len, window):
    """Keys outside the window have no mass; if no others remain, the first are selected."""
    patterns = [
        make("vertical_slash", vertical=vertical, slash=slash, last_q=last_q, coverage=share)
        for vertical, slash, last_q in ((1, 1, 64), (100, 90, 20), (9999, 9999, 20))
        for share in COVERAGES
    ] * 2
    q, k = problem(q_len, k_len, heads=len(patterns))
    index = LayerPlan(patterns, 2).build(q, k, window=window)
    index.validate()
    for h, head in enumerate(patterns):
        kv_head = slice(h // 9, h // 9 + 1)
        by_column, by_distance = masses(q[:, [h]], k[:, kv_head], head.last_q, window)
        for b in range(2):
            size = max(head.vertical, TILE)
            columns = smallest(by_column[b, 0].tolist(), head.coverage, size, TILE)
            assert kept(index.columns[b, h]) == columns
            size = max(head.slash, TILE)
            distances = smallest(by_distance[b, 0].tolist(), head.coverage, size, TILE)
            assert kept(index.diagonals[b, h]) == csr_offsets(distances, k_len)


def tile_masses(q: Tensor, k: Tensor, reach: int) -> dict[int, dict[int, float]]:
    """Of one head, by query tile, the mass of each key tile; q (Q, D), k (K, D).

    The mean query attends to the mean keys up to its own, in tiles within reach."""
    offset = len(k) - len(q)
    keys = torch.stack([part.double().mean(0) for part in k.split(TILE)])
    result = {}
    for at in range(offset // TILE, len(keys)):
        mine = slice(max(at * TILE - offset, 0), (at + 1) * TILE - offset)
        first = max(at - reach, 0)
        weights = (keys[first : at + 1] @ q[mine].double().mean(0) * 0.25).softmax(0)
        result[at] = dict(enumerate(weights.tolist(), start=first))
    return result


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(
    ("q_len", "k_len", "window"), [*LENGTHS, (9, 125, None), (257, 700, None), (500, 900, 200)]
)
def test_block_sparse_selects_fewest_for_coverage(q_len, k_len, window):
    patterns = [
        make("block_sparse", blocks=n, coverage=share) for n in (1, 4, 5, 99) for share in COVERAGES
    ]
    q, k = problem(q_len, k_len, heads=len(patterns))
    index = LayerPlan(patterns, 2).build(q, k, window=window)
    index.validate()
    reach = k_len if window is None else -(-(window - 1) // TILE)
    for b in range(2):
        for h, head in enumerate(patterns):
            listed = index.padded_tiles()[b, h]
            for at, tiles in tile_masses(q[b, h], k[b, h // 6], reach).items():
                # The query's tile comes first, then tile 0: both are always selected.
                order = [at, *(tile for tile in sorted(tiles) if tile != at)]
                forced = 1 + (0 in tiles)
                mass = [tiles[tile] for tile in order]
                selected = smallest(mass, head.coverage, max(head.blocks, 2), forced)
                assert kept(listed[at - index.first_row]) == {order[i] for i in selected} - {at}


@pytest.mark.parametrize(
    ("q_len", "k_len"), [(1, 1), (63, 63), (1000, 1000), (63, 257), (200, 450)]
)
@pytest.mark.parametrize(("sink", "window"), [(70, 130), (1, 1), (1, 9999), (9999, 1)])
def test_a_shape_equals_its_mask(sink, window, q_len, k_len):
    q, k = problem(q_len, k_len)
    index = LayerPlan([make("a_shape", sink=sink, window=window)] * 4, 2).build(q, k)
    index.validate()
    key, query = torch.arange(k_len), torch.arange(k_len - q_len, k_len)[:, None]
    near = query // TILE - key // TILE <= -(-(window - 1) // TILE)
    mask = (near | (key < max(sink, TILE))) & (key <= query)
    assert torch.equal(index.to_mask(), mask.expand(2, 4, -1, -1))


@pytest.mark.usefixtures("builder")
def test_full_coverage_selects_all_nonzero_mass():
    """All keys have weight 0 in fp32 except a few in tiles 1, 2 and 4, or in tile 2 only."""
    q, k = torch.ones(1, 2, 500, 16), torch.full((1, 1, 500, 16), -100.0)
    k[:, :, [70, 71, 140, 300]] = 0.1
    sizes = {"vertical": 500, "slash": 500, "last_q": 1}
    patterns = [make("vertical_slash", **sizes, coverage=share) for share in (1.0, None)]
    index = LayerPlan(patterns, 1).build(q, k)
    assert kept(index.columns[0, 0]) == {*range(TILE), 70, 71, 140, 300}
    distances = {0, 1, *(499 - column for column in (70, 71, 140, 300))}
    assert kept(index.diagonals[0, 0]) == csr_offsets(distances, 500)
    assert kept(index.columns[0, 1]) == set(range(500))
    k[:] = -100.0
    k[:, :, 2 * TILE : 3 * TILE] = 0.1
    tiles = LayerPlan([make("block_sparse", blocks=99, coverage=1.0)] * 2, 1).build(q, k)
    # Before tile 2 all keys are equally far: their shares are equal, and none is 0.
    seen = [kept(row) for row in tiles.padded_tiles()[0, 0]]
    assert seen == [set(), {0}, {0}, *[{0, 2}] * 5]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_best_of_rows_matches_definition(data):
    """Ties, masked entries, forced entries and coverage."""
    n, forced = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 4))
    # Sixteenths add up exactly, in whatever order.
    score = st.one_of(st.integers(0, 40).map(lambda n: n / 16), st.just(float("-inf")))
    rows = data.draw(st.lists(st.lists(score, min_size=n, max_size=n), min_size=6, max_size=6))
    size = data.draw(st.integers(1, 50))
    coverage = data.draw(st.one_of(st.none(), st.sampled_from([0.25, 0.5, 1.0])))
    scores = torch.tensor(rows, dtype=torch.float32).view(2, 3, n)
    before = scores.clone()
    result = best(scores, size, coverage=coverage, forced=forced)
    assert torch.equal(scores, before) and result.dtype == torch.int32
    assert result.shape == (2, 3, min(n, size))
    for mass, places in zip(rows, result.flatten(0, 1).tolist(), strict=True):
        there = [i for i in range(n) if mass[i] != float("-inf")]
        expected = smallest(
            [mass[i] for i in there], coverage, size, sum(i < forced for i in there)
        )
        assert places[: len(expected)] == sorted(there[i] for i in expected)
        assert set(places[len(expected) :]) <= {PAD}


@pytest.mark.usefixtures("builder")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_top_k_call_matches_definition(data):
    """Native code and torch agree on ties, masked entries, ends and counts."""
    n, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 50))
    score = st.one_of(st.integers(-20, 20).map(lambda n: n / 16), st.just(float("-inf")))
    rows = data.draw(st.lists(st.lists(score, min_size=n, max_size=n), min_size=2, max_size=2))
    ends, counts = (
        data.draw(st.one_of(st.none(), st.lists(st.integers(0, 45), min_size=2, max_size=2)))
        for _ in range(2)
    )
    bounds = {
        name: torch.tensor(x, dtype=torch.int32)
        for name, x in (("ends", ends), ("counts", counts))
        if x
    }
    scores = torch.tensor(rows, dtype=torch.float32)
    before = scores.clone()
    result = TopKCall(scores, width, **bounds).run()
    assert torch.equal(scores, before) and result.dtype == torch.int32
    assert result.shape == (2, min(n, width))
    for row, places in enumerate(result.tolist()):
        end = n if ends is None else min(n, ends[row])
        there = [i for i in range(end) if rows[row][i] != float("-inf")]
        size = width if counts is None else min(width, counts[row])
        expected = sorted(sorted(there, key=lambda i: (-rows[row][i], i))[:size])
        assert places == expected + [PAD] * (min(n, width) - len(expected))


@pytest.mark.usefixtures("builder")
def test_top_k_call_with_negative_scores_and_zeros():
    scores = torch.tensor([[-1.0, -5.0, -0.5, 3.0, -0.0, 0.0]])
    assert TopKCall(scores, 4).run().tolist() == [[2, 3, 4, 5]]


def test_best_takes_a_forced_entry_whatever_it_is():
    places = best(torch.tensor([[float("nan"), 1.0, 2.0, 3.0]]), 2, forced=1)
    assert places[0, 0] == 0


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (100, 300)])
def test_estimate_of_any_heads_matches_definition(q_len, k_len, window):
    """Heads in any order, with different last_q, on some KV heads, with keys in every layout."""
    torch.manual_seed(k_len)
    q = torch.randn(2, q_len, 6, 24).transpose(1, 2)
    k = torch.randn(2, k_len, 3, 24).transpose(1, 2)
    heads, last_q = [5, 0, 4, 1], [10, 64, 10, 3]
    result = EstimateCall(q, k, heads, last_q, scale=0.2, window=window).run()
    for at, (head, asked) in enumerate(zip(heads, last_q, strict=True)):
        kv_slice = slice(head // 2, head // 2 + 1)
        expected = masses(q[:, head : head + 1], k[:, kv_slice], asked, window, scale=0.2)
        for one_mass, right in zip((result.vertical, result.slash()), expected, strict=True):
            torch.testing.assert_close(one_mass[:, at].double(), right[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("bytes_of_scratch", [1, 1 << 12])
def test_build_of_head_is_independent_of_other_heads_and_memory(bytes_of_scratch, monkeypatch):
    """Heads of equal size are built in batches and returned in their original order."""
    patterns = [
        make("vertical_slash", vertical=90, slash=100),
        make("block_sparse", blocks=4, coverage=0.8),
        make("block_sparse", blocks=3),
        make("block_sparse", blocks=4),
        make("vertical_slash", vertical=70, slash=300, last_q=20),
        make("vertical_slash", vertical=90, slash=100, coverage=0.9),
        make("skip_softmax", scale_factor=30.0),
        make("dense"),
    ]
    q, k = problem(450, 450, heads=8)
    alone = [
        LayerPlan([pattern], 1).build(q[:, [head]], k[:, [head // 4]]).to_mask()
        for head, pattern in enumerate(patterns)
    ]
    monkeypatch.setitem(block_sparse._SCRATCH_BYTES, "cpu", bytes_of_scratch)
    together = LayerPlan(patterns, 2).build(q, k).to_mask()
    assert torch.equal(together, torch.cat(alone, dim=1))


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_build_with_half_precision_and_strides_is_correct(dtype):
    """Keys differ by more than rounding: 16 bits and a transposed view select the same."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 300, 16).abs()
    k = torch.randn(1, 1, 300, 16) * 0.01
    k[:, :, [70, 130, 200]] += 3
    patterns = [make("vertical_slash", vertical=67, slash=64), make("block_sparse", blocks=4)]
    plan = LayerPlan(patterns, 1)
    exact = plan.build(q, k)
    assert {70, 130, 200} < kept(exact.columns[0, 0])
    rounded = plan.build(
        *(x.transpose(1, 2).contiguous().transpose(1, 2).to(dtype) for x in (q, k))
    )
    assert torch.equal(rounded.to_mask(), exact.to_mask())


@pytest.mark.usefixtures("builder")
def test_build_with_ties_selects_the_first():
    """Tiles of equal score, and columns and diagonals of equal weight."""
    q, k = torch.zeros(1, 2, 500, 8), torch.ones(1, 1, 500, 8)
    plan = LayerPlan(
        [make("vertical_slash", vertical=100, slash=100, last_q=1), make("block_sparse", blocks=3)],
        1,
    )
    index = plan.build(q, k)
    index.validate()
    assert kept(index.columns[0, 0]) == set(range(100)) and kept(index.diagonals[0, 0]) == {0, 1, 2}
    assert [kept(row) for row in index.padded_tiles()[0, 1]] == [set(), {0}, *[{0, 1}] * 6]
