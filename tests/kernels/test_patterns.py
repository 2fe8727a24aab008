"""Patterns, plans and indices: sizes, growth with the length, and refusals.

What they select is compared in tests/conformance/test_builders.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.index import PAD, lists
from kernels.patterns import KINDS, Inputs, LayerPlan, Pattern, make
from kernels.ragged import Ragged
from tests.kernels.kinds import KINDS_DRAWN, LAYER


def problem(q_len: int, k_len: int, heads: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(q_len + k_len)
    return torch.randn(1, heads, q_len, 16), torch.randn(1, 2, k_len, 16)


def test_kinds_are_those_of_the_tables():
    assert set(KINDS_DRAWN) == {pattern.kind for pattern in LAYER} == set(KINDS)


def test_prepared_builder_equals_fresh_builder():
    q, k = problem(300, 450)
    inputs = Inputs([1, 3], q, k, 0.25)
    for kind, entry in KINDS_DRAWN.items():
        small = [make(kind, **entry.small)] * 2
        build = KINDS[kind].prepare([make(kind, **entry.large)] * 2, inputs)
        fresh = KINDS[kind].prepare(small, inputs)(small)
        assert torch.equal(build(small).to_mask(), fresh.to_mask())


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (65, 65), (1000, 1000), (100, 450)])
def test_build_reads_no_data_back(q_len, k_len):
    """Meta tensors, which hold no data to read, produce an index of the same shapes."""
    plan = LayerPlan(LAYER, 2)
    q, k = problem(q_len, k_len, heads=len(LAYER))
    index, unread = plan.build(q, k), plan.build(q.to("meta"), k.to("meta"))
    for name in ("diagonals", "tiles", "columns"):
        assert getattr(unread, name).shape == getattr(index, name).shape


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("vertical_slash", {"vertical": 1000, "slash": 6096, "coverage": 0.95}),
        ("block_sparse", {"blocks": 100}),
        ("a_shape", {"sink": 1024, "window": 4096}),
    ],
)
def test_index_of_a_million_tokens_is_small(kind, sizes):
    length = 1 << 20
    q, k = (
        torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8)
    )
    assert LayerPlan([make(kind, **sizes)] * 32, 8).build(q, k).nbytes <= 256 << 20


def test_count_in_chunks_equals_count_at_once(monkeypatch):
    q, k = problem(700, 900, heads=len(LAYER))
    index = LayerPlan(LAYER, 2).build(q, k)
    mask, computed = index.to_mask(), index.computed_tiles()
    monkeypatch.setattr("kernels.index._SCRATCH", 1)
    assert torch.equal(index.to_mask(), mask) and torch.equal(index.computed_tiles(), computed)


def test_tiles_are_listed_for_the_heads_and_rows_that_have_them():
    patterns = [make("block_sparse", blocks=6), make("dense"), make("block_sparse", blocks=3)]
    q, k = torch.randn(2, 3, 700, 4), torch.randn(2, 1, 900, 4)
    index = LayerPlan(patterns, 1).build(q, k)
    rows = range(index.first_row, 15)
    assert len(index.tiles) == 2 * sum(min(5, at) + min(2, at) for at in rows)
    assert index.padded_tiles()[:, 1].eq(PAD).all()
    assert index.padded_tiles(slice(-1, None))[:, 2].ne(PAD).sum() == 2 * 2
    assert torch.equal(index.sequence(1).to_mask()[0], index.to_mask()[1])


UP_TO = r"for 1 sequences of up to \(130, 130\) .*, its ragged batch "


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
        ({"ragged": Ragged.left_padded([130, 100], 130, 130)}, UP_TO + "has 2"),
        ({"ragged": Ragged.left_padded([100], 130, 130)}, r"has 1 of up to \(100, 100\)"),
    ],
)
def test_validate_error_names_the_fault(change, message):
    index = LayerPlan([make("dense")] * 2, 1).build(
        torch.zeros(1, 2, 130, 4), torch.zeros(1, 1, 130, 4)
    )
    with pytest.raises(ValueError, match=message):
        replace(index, **change).validate()


SEARCHED = 256
PATTERNS = [*LAYER, *LAYER[:2]]


@pytest.mark.parametrize(
    ("k_len", "vertical", "slash", "blocks", "window"),
    [
        (64, 100, 70, 3, 101),  # no pattern shrinks on fewer keys
        (256, 100, 70, 3, 101),  # as searched
        (250, 100, 70, 3, 101),  # the same tiles
        (257, 125, 88, 4, 126),  # 5 tiles for 4
        (1024, 400, 280, 12, 404),
    ],
)
def test_at_more_keys_scales_sizes_in_proportion(k_len, vertical, slash, blocks, window):
    def row(vertical: int, slash: int, blocks: int, window: int) -> tuple[Pattern, ...]:
        return (
            make("vertical_slash", vertical=vertical, slash=slash, last_q=9, coverage=0.9),
            make("block_sparse", blocks=blocks),
            make("a_shape", sink=64, window=window),
            make("skip_softmax", scale_factor=3.0),
            make("dense"),
        )

    plan = LayerPlan(row(100, 70, 3, 101), 1, length=SEARCHED)
    assert plan.at(k_len).patterns == row(vertical, slash, blocks, window)
    assert LayerPlan(row(100, 70, 3, 101), 1).at(k_len).patterns == row(100, 70, 3, 101)


@pytest.mark.parametrize("q_len", [700, 64])
def test_build_on_more_keys_equals_larger_patterns(q_len):
    q, k = problem(q_len, 700, heads=16)
    plan = LayerPlan(PATTERNS, 2, dense_tail=70, length=SEARCHED)
    larger = LayerPlan([p.scaled(11 / 4) for p in PATTERNS], 2, dense_tail=70)
    mask = plan.build(q, k).to_mask()
    assert torch.equal(mask, larger.build(q, k).to_mask())
    some = plan.select_kv_heads((1,)).build(q[:, 8:], k[:, 1:])
    assert torch.equal(some.to_mask(), mask[:, 8:])


def test_build_ragged_sequence_is_independent_of_its_batch():
    plan = LayerPlan(PATTERNS, 2, length=SEARCHED)
    alone = [problem(n, n, heads=16) for n in (130, 700, 300)]
    q, k = (torch.cat(parts, dim=2) for parts in zip(*alone, strict=True))
    starts = [0, 130, 830, 1130]
    index = plan.build(q, k, ragged=Ragged.packed(starts, starts))
    for s, own in enumerate(alone):
        assert torch.equal(index.sequence(s).to_mask(), plan.build(*own).to_mask())


def test_at_lengths_with_equal_tiles_share_one_plan_and_cache_few(monkeypatch):
    plan = LayerPlan([make("block_sparse", blocks=3), make("dense")], 1, length=SEARCHED)
    assert plan.at(257) is plan.at(320) and plan.at(320) is not plan.at(321)
    first = plan.at(257)
    for tiles in range(6, 100):
        plan.at(64 * tiles)
        plan.at(257)
    assert plan.at(257) is first
    assert len(plan._lengths) <= 16
    monkeypatch.setattr(Pattern, "scaled", None)
    plan.at(64 * 99)
    with pytest.raises(TypeError):
        plan.at(64 * 6)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("slash_only", {}, "unknown pattern kind 'slash_only'; known: dense, a_shape, "),
        ("a_shape", {"sink": 1, "window": 1, "blocks": 2}, "'blocks'; it has: sink, window"),
        ("dense", {"blocks": 2}, "dense has no size 'blocks'; it has: none"),
        ("a_shape", {"sink": 0, "window": 1}, "sink must be a positive integer, got 0"),
        ("a_shape", {"sink": 1, "window": 1.5}, "window must be a positive integer, got 1.5"),
        ("block_sparse", {"blocks": True}, "blocks must be a positive integer, got True"),
        ("a_shape", {"sink": 1}, "a_shape needs a size 'window'"),
        ("block_sparse", {"blocks": 1, "coverage": 0.0}, "at most 1, got 0.0"),
        ("block_sparse", {"blocks": 1, "coverage": 1.01}, "at most 1, got 1.01"),
        ("block_sparse", {"blocks": 1, "coverage": float("nan")}, "at most 1, got nan"),
        ("vertical_slash", {"vertical": 1, "slash": 1, "coverage": True}, "at most 1, got True"),
    ],
)
def test_make_error_names_the_fault(kind, sizes, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "0 query heads do not divide into 2 KV heads"),
        ({"heads": 3}, "3 query heads do not divide into 2 KV heads"),
        ({"kv_heads": -1}, "4 query heads do not divide into -1 KV heads"),
        ({"q": (1, 3, 5, 8)}, "planned for 4 query and 2 KV heads, got 3 and 2"),
        ({"q": (1, 4, 6, 8)}, "query length must be between 1 and key length 5, got 6"),
        ({"q": (1, 4, 0, 8)}, "query length must be between 1 and key length 5, got 0"),
        ({"q": (4, 5, 8)}, "q and k must be 4-D"),
        ({"q": (2, 4, 5, 8)}, "q and k must share batch and head dim"),
    ],
)
def test_plan_error_names_the_mismatch(change, message):
    arguments = {"heads": 4, "kv_heads": 2, "q": (1, 4, 5, 8)} | change
    with pytest.raises(ValueError, match=message):
        plan = LayerPlan([make("dense")] * arguments["heads"], arguments["kv_heads"])
        plan.build(torch.zeros(arguments["q"]), torch.zeros(1, 2, 5, 8))


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
