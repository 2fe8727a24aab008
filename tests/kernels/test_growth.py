"""Sizes that grow: on more keys than were searched a plan has larger patterns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.patterns import KINDS, LayerPlan, Pattern, make
from kernels.ragged import Ragged
from tests.kernels.kinds import LAYER

SEARCHED = 256


def problem(q_len: int, k_len: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(1, 16, q_len, 8), torch.randn(1, 2, k_len, 8)


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


def test_build_on_more_keys_equals_larger_patterns():
    for q_len in (700, 64):
        q, k = problem(q_len, 700)
        index = LayerPlan(PATTERNS, 2, dense_tail=70, length=SEARCHED).build(q, k)
        written = LayerPlan([p.scaled(11 / 4) for p in PATTERNS], 2, dense_tail=70).build(q, k)
        assert torch.equal(index.to_mask(), written.to_mask())


def test_build_ragged_sequence_is_independent_of_its_batch():
    lengths = [130, 700, 300]
    plan = LayerPlan(PATTERNS, 2, length=SEARCHED)
    alone = [problem(n, n, seed=n) for n in lengths]
    q, k = (torch.cat(parts, dim=2) for parts in zip(*alone, strict=True))
    starts = [0, 130, 830, 1130]
    index = plan.build(q, k, ragged=Ragged.packed(starts, starts))
    for s, own in enumerate(alone):
        assert torch.equal(index.sequence(s).to_mask(), plan.build(*own).to_mask())


def test_plan_of_some_kv_heads_grows_like_the_full_plan():
    q, k = problem(300, 600)
    plan = LayerPlan(PATTERNS, 2, length=SEARCHED)
    some = plan.select_kv_heads((1,)).build(q[:, 8:], k[:, 1:])
    assert torch.equal(some.to_mask(), plan.build(q, k).to_mask()[:, 8:])


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


def test_every_sized_kind_grows():
    assert {kind for kind, cls in KINDS.items() if cls.growing} == {
        p.kind for p in LAYER if p.kind not in ("dense", "skip_softmax")
    }
