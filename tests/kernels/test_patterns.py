"""Patterns against the plainest computation of their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.index import PAD, TILE
from kernels.patterns import KINDS, Inputs, LayerPlan, Pattern, make
from tests.kernels.kinds import KINDS_DRAWN

LENGTHS = [(1, 1), (64, 64), (65, 65), (300, 300), (1, 300), (63, 257), (200, 450), (64, 640)]


def problem(q_len: int, k_len: int, *, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(q_len * 1000 + k_len)
    return torch.randn(2, heads, q_len, 16) * 2, torch.randn(2, kv_heads, k_len, 16)


def kept(index_row: Tensor) -> set[int]:
    return {int(i) for i in index_row if i != PAD}


@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
@pytest.mark.parametrize(
    ("sink", "window"), [(1, 1), (64, 64), (65, 65), (100, 2), (3, 130), (9999, 1), (1, 9999)]
)
def test_a_shape_keeps_sinks_and_window(q_len: int, k_len: int, sink: int, window: int) -> None:
    q, k = problem(q_len, k_len)
    mask = LayerPlan([make("a_shape", sink=sink, window=window)] * 4, 2).build(q, k).to_mask()
    key, query = torch.arange(k_len), torch.arange(k_len - q_len, k_len)[:, None]
    causal, distance = key <= query, query - key
    assert mask[..., causal & ((key < sink) | (distance < window))].all()
    # Whole tiles: up to the edge of the one in which the first query's window ends, seen from the
    # last query.
    beyond = (key >= max(sink, TILE)) & (distance >= window + 2 * (TILE - 1))
    assert not mask[..., causal & beyond].any()


def last_attention(
    q: Tensor, k: Tensor, last_q: int, window: int = 1 << 30
) -> tuple[Tensor, Tensor]:
    """Mass on each column and distance from the last queries, (B, H, K) fp64, by definition."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    last, k_len = min(last_q, q.shape[2]), k.shape[2]
    query = torch.arange(k_len - last, k_len)[:, None]
    distance = query - torch.arange(k_len)
    logits = q[:, :, -last:].double() @ keys.transpose(2, 3) * 16**-0.5
    weights = logits.masked_fill((distance < 0) | (distance >= window), float("-inf")).softmax(-1)
    slash = torch.zeros(*weights.shape[:2], k_len, dtype=torch.float64)
    for row in range(last):
        seen = distance[row] >= 0
        slash[..., distance[row][seen]] += weights[:, :, row, seen]
    return weights.sum(2), slash


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
@pytest.mark.parametrize(
    ("vertical", "slash", "last_q"), [(1, 1, 64), (80, 75, 64), (100, 70, 20), (70, 9999, 64)]
)
def test_vertical_slash_keeps_the_best(
    q_len: int, k_len: int, vertical: int, slash: int, last_q: int
) -> None:
    q, k = problem(q_len, k_len)
    head = make("vertical_slash", vertical=vertical, slash=slash, last_q=last_q)
    index = LayerPlan([head] * 4, 2).build(q, k)
    mask = index.to_mask()
    query = torch.arange(k_len - q_len, k_len)
    columns, distances = last_attention(q, k, last_q)
    columns[..., :TILE], distances[..., :TILE] = float("inf"), float("inf")
    for b in range(2):
        for h in range(4):
            best = columns[b, h].topk(min(max(vertical, TILE), k_len)).indices
            assert kept(index.columns[b, h]) == set(best.tolist())
            assert (mask[b, h][:, best] == (best <= query[:, None])).all()
            best = distances[b, h].topk(min(max(slash, TILE), k_len)).indices
            offsets = {
                o
                for s in best.tolist()
                for o in (s // TILE, -(-s // TILE))
                if o < -(-k_len // TILE)
            }
            assert kept(index.diagonals[b, h]) == offsets
            key = query - best[:, None]
            rows = torch.arange(q_len).expand_as(key)
            assert mask[b, h][rows[key >= 0], key[key >= 0]].all(), "a diagonal has holes"


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 99])
def test_block_sparse_keeps_the_nearest_means(q_len: int, k_len: int, blocks: int) -> None:
    q, k = problem(q_len, k_len)
    index = LayerPlan([make("block_sparse", blocks=blocks)] * 4, 2).build(q, k)
    offset = k_len - q_len
    for b in range(2):
        for h in range(4):
            keys = [part.double().mean(0) for part in k[b, h // 2].split(TILE)]
            for row in range(index.num_rows):
                at = offset // TILE + row
                queries = slice(max(at * TILE - offset, 0), (at + 1) * TILE - offset)
                mean = q[b, h, queries].double().mean(0)
                ranked = sorted(range(1, at), key=lambda t: -float(mean @ keys[t]))
                expected = {0, *ranked[: max(blocks, 2) - 2]} if at else set()
                assert kept(index.listed()[b, h, row]) == expected
            assert kept(index.diagonals[b, h]) == {0}


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_strides_are_read_right(dtype: torch.dtype) -> None:
    """Keys far beyond rounding: 16 bits and a transposed view choose the same."""
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


def test_a_prepared_builder_gives_what_a_fresh_one_gives() -> None:
    q, k = problem(300, 450)
    inputs = Inputs([1, 3], q, k, 0.25)
    for kind, entry in KINDS_DRAWN.items():
        small = [make(kind, **entry.small)] * 2
        build = KINDS[kind].prepare([make(kind, **entry.large)] * 2, inputs)
        fresh = KINDS[kind].prepare(small, inputs)(small)
        assert torch.equal(build(small).to_mask(), fresh.to_mask())


@pytest.mark.usefixtures("builder")
def test_of_equals_the_first_are_taken() -> None:
    """Rows of tiles that score alike; columns and diagonals that weigh the same."""
    q, k = torch.zeros(1, 2, 500, 8), torch.ones(1, 1, 500, 8)
    plan = LayerPlan(
        [make("vertical_slash", vertical=100, slash=100, last_q=1), make("block_sparse", blocks=3)],
        1,
    )
    index = plan.build(q, k)
    index.validate()
    assert kept(index.columns[0, 0]) == set(range(100)) and kept(index.diagonals[0, 0]) == {0, 1, 2}
    assert [kept(row) for row in index.listed()[0, 1]] == [set(), {0}, *[{0, 1}] * 6]


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(
    ("q_len", "k_len"), [(65, 65), (300, 300), (63, 257), (200, 450), (64, 640)]
)
@pytest.mark.parametrize("window", [1, 2, 65, 130, 10_000])
def test_what_lies_beyond_the_window_is_not_chosen(q_len: int, k_len: int, window: int) -> None:
    q, k = problem(q_len, k_len)
    patterns = [
        make("vertical_slash", vertical=90, slash=100, last_q=10),
        make("block_sparse", blocks=3),
    ] * 2
    index = LayerPlan(patterns, 2).build(q, k, window=window)
    index.validate()
    columns, distances = last_attention(q, k, 10, window)
    columns[..., :TILE], distances[..., :TILE] = float("inf"), float("inf")
    best_columns, best_distances = (
        x.sort(descending=True, stable=True).indices for x in (columns, distances)
    )
    reach = -(-(window - 1) // TILE)
    for b in range(2):
        assert kept(index.columns[b, 0]) == set(best_columns[b, 0, :90].tolist())
        offsets = {
            o for s in best_distances[b, 0, :100].tolist() for o in (s // TILE, -(-s // TILE))
        }
        assert kept(index.diagonals[b, 0]) == {o for o in offsets if o < -(-k_len // TILE)}
        keys = [part.double().mean(0) for part in k[b, 1].split(TILE)]
        for row in range(index.num_rows):
            at, offset = index.first_row + row, k_len - q_len
            mean = q[b, 3, max(at * TILE - offset, 0) : (at + 1) * TILE - offset].double().mean(0)
            seen = range(max(at - reach, 0), at)
            ranked = sorted(seen, key=lambda t: float("-inf") if t == 0 else -float(mean @ keys[t]))
            assert kept(index.listed()[b, 3, row]) == set(ranked[:2])


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (65, 65), (1000, 1000), (100, 450)])
def test_a_build_reads_no_data_back(
    q_len: int, k_len: int, layer_of_unlike_heads: tuple[Pattern, ...]
) -> None:
    """Tensors without data, which nobody can wait for, give an index of the same shapes."""
    patterns = [*layer_of_unlike_heads, *layer_of_unlike_heads][
        : 2 * (len(layer_of_unlike_heads) // 2)
    ]
    plan = LayerPlan(patterns, 2)
    q, k = problem(q_len, k_len, heads=len(patterns))
    index, unread = plan.build(q, k), plan.build(q.to("meta"), k.to("meta"))
    for name in ("diagonals", "tiles", "columns"):
        assert getattr(unread, name).shape == getattr(index, name).shape


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("vertical_slash", {"vertical": 1000, "slash": 6096}),
        ("vertical_slash", {"vertical": 1000, "slash": 6096, "coverage": 0.95}),
        ("block_sparse", {"blocks": 100}),
        ("a_shape", {"sink": 1024, "window": 4096}),
        ("strided", {"sink": 1024, "window": 4096, "stride": 8}),
    ],
)
def test_an_index_of_a_million_tokens_is_small(kind: str, sizes: dict[str, Any]) -> None:
    length = 1 << 20
    q, k = (
        torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8)
    )
    assert LayerPlan([make(kind, **sizes)] * 32, 8).build(q, k).nbytes <= 256 << 20


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            "slash_only",
            {},
            "unknown pattern kind 'slash_only'; known: dense, a_shape, tri_shape, dilated, "
            "strided, static, ",
        ),
        (
            "a_shape",
            {"sink": 1, "window": 1, "blocks": 2},
            "a_shape has no size 'blocks'; it has: sink, window",
        ),
        ("dense", {"blocks": 2}, "dense has no size 'blocks'; it has: none"),
        ("a_shape", {"sink": 0, "window": 1}, "a_shape: sink must be a positive integer, got 0"),
        (
            "a_shape",
            {"sink": 1, "window": -5},
            "a_shape: window must be a positive integer, got -5",
        ),
        (
            "vertical_slash",
            {"vertical": 1.5, "slash": 1},
            "vertical must be a positive integer, got 1.5",
        ),
        (
            "vertical_slash",
            {"vertical": 1, "slash": 1, "last_q": 0},
            "last_q must be a positive integer, got 0",
        ),
        ("block_sparse", {"blocks": True}, "blocks must be a positive integer, got True"),
        ("block_sparse", {}, "block_sparse needs a size 'blocks'"),
        ("strided", {"sink": 1, "window": 1}, "strided needs a size 'stride'"),
        (
            "block_sparse",
            {"blocks": 1, "coverage": 0.0},
            "coverage must be above 0 and at most 1, got 0.0",
        ),
        (
            "block_sparse",
            {"blocks": 1, "coverage": 1.01},
            "coverage must be above 0 and at most 1, got 1.01",
        ),
        (
            "block_sparse",
            {"blocks": 1, "coverage": float("nan")},
            "coverage must be above 0 and at most 1, got nan",
        ),
        ("vertical_slash", {"vertical": 1, "slash": 1, "coverage": "0.9"}, "at most 1, got '0.9'"),
        ("vertical_slash", {"vertical": 1, "slash": 1, "coverage": True}, "at most 1, got True"),
        (
            "static",
            {"columns": [1], "diagonals": ()},
            "static: columns must be a tuple of integers, got list",
        ),
        (
            "static",
            {"columns": (), "diagonals": (0, 2, 1)},
            "static: diagonals must be ascending, got 1 after 2",
        ),
        (
            "static",
            {"columns": (5, 5), "diagonals": ()},
            "static: columns must be ascending, got 5 after 5",
        ),
        (
            "static",
            {"columns": (-1,), "diagonals": ()},
            "columns must hold integers from 0 to 2147483646, got -1",
        ),
        ("static", {"columns": (2**31 - 1,), "diagonals": ()}, "2147483646, got 2147483647"),
        ("static", {"columns": (1.0,), "diagonals": ()}, "2147483646, got 1.0"),
    ],
)
def test_make_names_what_is_wrong(kind: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(kind, **sizes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "message"),
    [
        (0, 1, "0 query heads do not divide into 1 KV heads"),
        (3, 2, "3 query heads do not divide into 2 KV heads"),
        (3, 0, "3 query heads do not divide into 0 KV heads"),
        (3, -1, "3 query heads do not divide into -1 KV heads"),
    ],
)
def test_plan_refuses_heads_that_do_not_divide(heads: int, kv_heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerPlan([make("dense")] * heads, kv_heads)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "message"),
    [
        ((1, 3, 5, 8), (1, 2, 5, 8), "planned for 4 query and 2 KV heads, got 3 and 2"),
        ((1, 4, 5, 8), (1, 1, 5, 8), "planned for 4 query and 2 KV heads, got 4 and 1"),
        ((1, 4, 6, 8), (1, 2, 5, 8), "query length must be between 1 and key length 5, got 6"),
        ((1, 4, 0, 8), (1, 2, 5, 8), "query length must be between 1 and key length 5, got 0"),
        ((4, 5, 8), (1, 2, 5, 8), "q and k must be 4-D"),
        ((2, 4, 5, 8), (1, 2, 5, 8), "q and k must share batch and head dim"),
        ((1, 4, 5, 4), (1, 2, 5, 8), "q and k must share batch and head dim"),
    ],
)
def test_plan_names_what_does_not_fit(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LayerPlan([make("dense")] * 4, 2).build(torch.zeros(q_shape), torch.zeros(k_shape))
