"""Sizes that grow: the plan for a length is that of patterns with these sizes."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kernels.patterns import Growth, LayerPlan, make
from kernels.ragged import Ragged
from tests.kernels.kinds import LAYER

GROWTH = Growth(
    length=256,
    powers={
        "vertical_slash": {"vertical": 0.5, "slash": 1.0},
        "block_sparse": {"blocks": 1.0},
        "a_shape": {"window": 0.5, "sink": 0.0},
    },
)


def problem(q_len: int, k_len: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(1, 16, q_len, 8), torch.randn(1, 2, k_len, 8)


PATTERNS = [*LAYER, *LAYER[:2]]
A_SHAPE = make("a_shape", sink=1, window=1)
SKIP = make("skip_softmax", scale_factor=3.0)


@pytest.mark.parametrize(
    ("k_len", "vertical", "slash", "blocks", "window"),
    [
        (256, 100, 70, 3, 101),  # where they were found
        (250, 100, 70, 3, 101),  # the same tiles
        (257, 112, 88, 4, 113),  # 5 tiles for 4
        (1024, 200, 280, 12, 202),
        (60, 50, 18, 1, 50),  # never below one; round(0.75) blocks
    ],
)
def test_sizes_at_a_length(k_len, vertical, slash, blocks, window):
    assert GROWTH.grown(
        make("vertical_slash", vertical=100, slash=70, last_q=9, coverage=0.9), k_len
    ) == make("vertical_slash", vertical=vertical, slash=slash, last_q=9, coverage=0.9)
    assert GROWTH.grown(make("block_sparse", blocks=3), k_len) == make(
        "block_sparse", blocks=blocks
    )
    assert GROWTH.grown(make("a_shape", sink=64, window=101), k_len) == make(
        "a_shape", sink=64, window=window
    )
    assert GROWTH.grown(SKIP, k_len) is SKIP


def test_a_layer_is_built_with_the_sizes_of_its_keys():
    for q_len in (700, 64):
        q, k = problem(q_len, 700)
        index = LayerPlan(PATTERNS, 2, dense_tail=70, growth=GROWTH).build(q, k)
        grown = [GROWTH.grown(pattern, 700) for pattern in PATTERNS]
        written = LayerPlan(grown, 2, dense_tail=70).build(q, k)
        assert torch.equal(index.to_mask(), written.to_mask())


def test_a_sequence_does_not_depend_on_the_others_of_its_batch():
    lengths = [130, 700, 300]
    plan = LayerPlan(PATTERNS, 2, growth=GROWTH)
    alone = [problem(n, n, seed=n) for n in lengths]
    q, k = (torch.cat(parts, dim=2) for parts in zip(*alone, strict=True))
    starts = [0, 130, 830, 1130]
    index = plan.build(q, k, ragged=Ragged.packed(starts, starts))
    for s, own in enumerate(alone):
        assert torch.equal(index.sequence(s).to_mask(), plan.build(*own).to_mask())


def test_some_kv_heads_grow_as_all_do():
    q, k = problem(300, 600)
    plan = LayerPlan(PATTERNS, 2, growth=GROWTH)
    some = plan.of((1,)).build(q[:, 8:], k[:, 1:])
    assert torch.equal(some.to_mask(), plan.build(q, k).to_mask()[:, 8:])


def test_lengths_of_the_same_tiles_share_a_plan_and_few_are_remembered(monkeypatch):
    plan = LayerPlan([make("block_sparse", blocks=3), make("dense")], 1, growth=GROWTH)
    assert plan.at(257) is plan.at(320) and plan.at(320) is not plan.at(321)
    first = plan.at(257)
    for tiles in range(6, 100):
        plan.at(64 * tiles)
        plan.at(257)
    assert plan.at(257) is first
    assert len(plan._lengths) <= 16
    monkeypatch.setattr(Growth, "grown", None)
    plan.at(64 * 99)
    with pytest.raises(TypeError):
        plan.at(64 * 6)


@pytest.mark.parametrize(
    ("pattern", "length", "sizes", "message"),
    [
        (A_SHAPE, 64, {"blocks": 1.0}, "no size 'blocks'; it has: sink, window"),
        (A_SHAPE, 0, {"sink": 1.0}, "length must be at least 1, got 0"),
        (A_SHAPE, 64, {"sink": 1.5}, "a_shape's sink must be from 0 to 1, got 1.5"),
        (A_SHAPE, 64, {"sink": float("nan")}, "from 0 to 1, got nan"),
        # Only sizes grow.
        (SKIP, 64, {"scale_factor": 1.0}, "no size 'scale_factor'; it has: none"),
        (make("block_sparse", blocks=1), 64, {"coverage": 1.0}, "has no size 'coverage'; it has: "),
    ],
)
def test_growth_that_cannot_be(pattern, length, sizes, message):
    with pytest.raises(ValueError, match=message):
        LayerPlan([pattern], 1, growth=Growth(length=length, powers={pattern.kind: sizes}))


def test_every_kind_of_the_layer_grows_where_it_can():
    """The cases above would say little if a kind were missing."""
    can = {p.kind for p in LAYER if any("fault" not in f.metadata for f in fields(p))}
    assert can == GROWTH.powers.keys()
