"""Builders read keys where they lie: the same bits from pages as from a tensor."""

from __future__ import annotations

import pytest
import torch

from kernels.patterns import LayerPlan, Pattern, make
from kernels.ragged import Ragged
from tests.conformance.builder_cases import (
    BY_NUMBER,
    EVERY,
    PAGED,
    Build,
    differences,
    paged,
)
from tests.kernels.kinds import LAYER
from tests.kernels.operations import Operations

HOST = torch.device("cpu")


@pytest.mark.usefixtures("builder")
def test_keys_are_cut_up_alike_wherever_they_lie(monkeypatch):
    monkeypatch.setattr("kernels.patterns.paged._AT_ONCE", 128)
    monkeypatch.setattr("kernels.patterns.block_sparse._SCRATCH_BYTES", {"cpu": 1})
    for name in (
        "pages: 100 of 300, pages of 37",
        "pages: batch 2, one KV head, D 80",
        "pages: window of 65, pages of 192",
    ):
        assert not any(differences(PAGED[name], HOST).values())


@pytest.mark.usefixtures("builder")
def test_sequences_of_unlike_lengths_have_pages_of_their_own():
    torch.manual_seed(0)
    lengths = ((70, 200), (1, 65), (130, 130))
    parts = [torch.randn(1, 2, k_len, 16, dtype=torch.float16) for _, k_len in lengths]
    q = torch.randn(1, 14, sum(q_len for q_len, _ in lengths), 16, dtype=torch.float16)
    whole = torch.full((3, 2, 200, 16), float("nan"), dtype=torch.float16)
    for row, part in enumerate(parts):
        whole[row, :, : part.shape[2]] = part
    where = paged(whole, Build(q_len=1, k_len=200, page=48))
    starts = [0, 70, 71]
    apart = Ragged.of(
        (0, start, *each[:1], 0, each[1]) for start, each in zip(starts, lengths, strict=True)
    )
    ends = [0, 200, 265]
    packed = Ragged.of(
        (0, s, each[0], e, each[1]) for s, e, each in zip(starts, ends, lengths, strict=True)
    )
    plan = LayerPlan(LAYER, 2, dense_tail=5)
    index = plan.build(q, where.cache, ragged=apart, block_table=where.table)
    expected = plan.build(q, torch.cat(parts, dim=2), ragged=packed)
    for name in ("diagonals", "tiles", "offsets", "columns"):
        assert torch.equal(getattr(index, name), getattr(expected, name))


def past(k_len: int, patterns: tuple[Pattern, ...]) -> tuple[int, int]:
    """Bytes of the largest tensor of a build of a short chunk on a past, and those of the past."""
    case = Build(q_len=8, k_len=k_len, page=64, kv_heads=2, head_dim=128)
    q, k = torch.randn(1, 6, case.q_len, 128).half(), torch.randn(1, 2, k_len, 128).half()
    where = paged(k, case)
    with Operations() as operations:
        LayerPlan(patterns, 2).build(q, where.cache, block_table=where.table, k_len=k_len)
    return operations.counts.largest, k.nbytes


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize("patterns", [BY_NUMBER, EVERY])
def test_nothing_as_large_as_the_past_is_made(patterns, monkeypatch):
    """But for torch's scratch, which does not grow with the past: here it is small."""
    monkeypatch.setattr("kernels.patterns.paged._AT_ONCE", 512)
    for scratch in ("block_sparse", "last_queries"):
        monkeypatch.setattr(f"kernels.patterns.{scratch}._SCRATCH_BYTES", {"cpu": 1 << 16})
    made, held = past(16_384, patterns)
    assert made <= held // 4


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
def test_pages_that_do_not_go_together_are_refused(change, message):
    given = {
        "k": torch.zeros(3, 64, 2, 8),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "k_len": 128,
    } | change
    with pytest.raises(ValueError, match=message):
        LayerPlan([make("vertical_slash", vertical=1, slash=1)] * 4, 2).build(
            torch.zeros(1, 4, 5, 8), **given
        )


def test_a_page_that_is_none_is_named():
    plan = LayerPlan([make("block_sparse", blocks=2)], 1)
    table = torch.tensor([[0, 7]], dtype=torch.int32)
    with pytest.raises((ValueError, IndexError), match="7"):
        plan.build(torch.zeros(1, 1, 5, 8), torch.zeros(3, 64, 1, 8), block_table=table, k_len=100)
