"""Coverage: the smallest sets that hold a share of the mass, against a greedy choice in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.index import PAD, TILE, SparseIndex
from kernels.patterns import LayerPlan, block_sparse, last_queries, make
from kernels.patterns.choose import best_places
from kernels.patterns.last_queries import estimate

pytestmark = pytest.mark.usefixtures("builder")

SHAPES = [(1, 1), (63, 63), (64, 64), (65, 65), (1000, 1000), (200, 450), (64, 640)]


def problem(q_len: int, k_len: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(q_len * 1000 + k_len)
    return torch.randn(2, 4, q_len, 16) * 2, torch.randn(2, 2, k_len, 16)


def kept(entries: Tensor) -> set[int]:
    return {int(i) for i in entries if i != PAD}


def smallest(mass: Sequence[float], share: float | None, size: int, forced: int) -> set[int]:
    """The forced ones, then the heaviest, until the share is held or the size is reached.

    All of the mass (1.0) is held only by all that have any, however little.
    """
    rest = sorted(range(min(forced, len(mass)), len(mass)), key=lambda i: (-mass[i], i))
    order = [*range(min(forced, len(mass))), *rest]
    chosen: list[int] = []
    for place in order[:size]:
        enough = (
            share is not None and share < 1 and sum(mass[i] for i in chosen) >= share * sum(mass)
        )
        if place >= forced and (enough or (share is not None and mass[place] == 0)):
            break
        chosen.append(place)
    return set(chosen)


def masses(q: Tensor, k: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Mass by column and by distance, (B, H, K) fp64."""
    keys, k_len = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1), k.shape[2]
    distance = torch.arange(k_len - last, k_len)[:, None] - torch.arange(k_len)
    logits = q[:, :, -last:].double() @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    weights = logits.masked_fill(distance < 0, float("-inf")).softmax(-1)
    slash = torch.zeros(*weights.shape[:2], k_len, dtype=torch.float64)
    slash.scatter_add_(
        2, distance.clamp_min(0).flatten().expand(*weights.shape[:2], -1), weights.flatten(2)
    )
    return weights.sum(2), slash


@pytest.mark.parametrize(("q_len", "k_len"), SHAPES)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize(("vertical", "slash"), [(100, 90), (9999, 9999)])
def test_vertical_slash_takes_the_fewest_that_hold_the_share(
    q_len: int, k_len: int, share: float, vertical: int, slash: int
) -> None:
    q, k = problem(q_len, k_len)
    head = make("vertical_slash", vertical=vertical, slash=slash, last_q=20, coverage=share)
    index = LayerPlan([head] * 4, 2).build(q, k)
    index.validate()
    by_column, by_distance = masses(q, k, min(20, q_len))
    for b in range(2):
        for h in range(4):
            columns = smallest(by_column[b, h].tolist(), share, max(vertical, TILE), TILE)
            assert kept(index.columns[b, h]) == columns
            distances = smallest(by_distance[b, h].tolist(), share, max(slash, TILE), TILE)
            offsets = {
                o for s in distances for o in (s // TILE, -(-s // TILE)) if o < -(-k_len // TILE)
            }
            assert kept(index.diagonals[b, h]) == offsets


@pytest.mark.parametrize(("q_len", "k_len"), SHAPES)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("blocks", [1, 4, 99])
def test_block_sparse_takes_the_fewest_that_hold_the_share(
    q_len: int, k_len: int, share: float, blocks: int
) -> None:
    q, k = problem(q_len, k_len)
    index = LayerPlan([make("block_sparse", blocks=blocks, coverage=share)] * 4, 2).build(q, k)
    index.validate()
    offset = k_len - q_len
    for b in range(2):
        for h in range(4):
            keys = torch.stack([part.double().mean(0) for part in k[b, h // 2].split(TILE)])
            for row in range(index.num_rows):
                at = index.first_row + row
                mean = (
                    q[b, h, max(at * TILE - offset, 0) : (at + 1) * TILE - offset].double().mean(0)
                )
                mass = (keys[: at + 1] @ mean * 16**-0.5).softmax(0).tolist()
                # The own tile stands first, then the first of all: both are always in.
                order = [at, *range(at)]
                chosen = smallest([mass[t] for t in order], share, max(blocks, 2), 2)
                assert kept(index.listed()[b, h, row]) == {order[i] for i in chosen} - {at}


def peaked(length: int) -> tuple[Tensor, Tensor]:
    """Keys that weigh 0 in fp32 but for a few in tiles 1, 2 and 4."""
    q, k = torch.ones(1, 2, length, 16), torch.full((1, 1, length, 16), -100.0)
    k[:, :, [70, 71, 140, 300]] = 0.1
    return q, k


def test_all_of_the_mass_is_all_that_has_any() -> None:
    q, k = peaked(500)
    patterns = [
        make("vertical_slash", vertical=500, slash=500, last_q=1, coverage=1.0),
        make("vertical_slash", vertical=500, slash=500, last_q=1),
    ]
    index = LayerPlan(patterns, 1).build(q, k)
    assert kept(index.columns[0, 0]) == {*range(TILE), 70, 71, 140, 300}
    distances = [499 - column for column in (70, 71, 140, 300)]
    assert kept(index.diagonals[0, 0]) == {
        0,
        1,
        *(o for s in distances for o in (s // TILE, -(-s // TILE))),
    }
    assert kept(index.columns[0, 1]) == set(range(500))


def test_all_of_the_mass_of_tiles() -> None:
    q, k = torch.ones(1, 1, 500, 16), torch.full((1, 1, 500, 16), -100.0)
    k[:, :, 2 * TILE : 3 * TILE] = 0.1
    index = LayerPlan([make("block_sparse", blocks=99, coverage=1.0)], 1).build(q, k)
    seen = [kept(row) for row in index.listed()[0, 0]]
    # Before tile 2 all keys are equally far: their shares are equal, and none is 0.
    assert seen == [set(), {0}, {0}, *[{0, 2}] * 5]


def test_heads_with_and_without_a_coverage_do_not_disturb_each_other() -> None:
    q, k = problem(450, 450)
    patterns = [
        make("block_sparse", blocks=4),
        make("block_sparse", blocks=6, coverage=0.7),
        make("block_sparse", blocks=2),
        make("block_sparse", blocks=6, coverage=0.3),
    ]
    together = LayerPlan(patterns, 2).build(q, k)
    for head, pattern in enumerate(patterns):
        alone = LayerPlan([pattern], 1).build(
            q[:, head : head + 1], k[:, head // 2 : head // 2 + 1]
        )
        assert torch.equal(alone.to_mask()[:, 0], together.to_mask()[:, head])


def held(index: SparseIndex, head: int, by_column: Tensor) -> float:
    return float(
        by_column[0, head, sorted(kept(index.columns[0, head]))].sum() / by_column[0, head].sum()
    )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 400),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.integers(1, 400),
    st.integers(0, 2**16),
)
def test_a_larger_share_never_takes_a_key_away(
    k_len: int, a: float, b: float, vertical: int, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k = torch.randn(1, 2, k_len, 8) * 3, torch.randn(1, 1, k_len, 8)
    patterns = [
        make("vertical_slash", vertical=vertical, slash=vertical, last_q=16, coverage=share)
        for share in sorted((a, b))
    ]
    index = LayerPlan(patterns, 1).build(q[:, :1].expand(-1, 2, -1, -1), k)
    mask = index.to_mask()
    assert not (mask[:, 0] & ~mask[:, 1]).any()
    by_column, _ = masses(q[:, :1].expand(-1, 2, -1, -1), k, min(16, k_len))
    for head, share in enumerate(sorted((a, b))):
        at_most = min(max(vertical, TILE), k_len)
        assert len(kept(index.columns[0, head])) <= at_most
        full = len(kept(index.columns[0, head])) == at_most
        assert full or held(index, head, by_column) >= share - 1e-5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_best_places(data: st.DataObject) -> None:
    """Native code and torch alike: ties, entries not to be taken, forced ones, shares."""
    n, forced = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 4))
    # Sixteenths add up exactly, in whatever order.
    score = st.one_of(st.integers(0, 40).map(lambda n: n / 16), st.just(float("-inf")))
    rows = data.draw(st.lists(st.lists(score, min_size=n, max_size=n), min_size=6, max_size=6))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=3, max_size=3))
    coverage = data.draw(
        st.lists(st.one_of(st.none(), st.sampled_from([0.25, 0.5, 1.0])), min_size=3, max_size=3)
    )
    # Two sequences, of which each may have an end and a count of its own.
    ends, counts = (
        data.draw(st.one_of(st.none(), st.lists(st.integers(0, 45), min_size=2, max_size=2)))
        for _ in range(2)
    )
    each = {
        name: torch.tensor(x, dtype=torch.int32)
        for name, x in (("ends", ends), ("counts", counts))
        if x
    }
    scores = torch.tensor(rows, dtype=torch.float32).view(2, 3, 1, n)
    before = scores.clone()
    found = best_places(scores, sizes, coverage, forced=forced, **each)
    assert (
        torch.equal(scores, before)
        and found.dtype == torch.int32
        and found.shape[-1] == min(n, max(sizes))
    )
    for sequence in range(2):
        for head in range(3):
            mass = scores[sequence, head, 0].tolist()
            there = [
                i
                for i in range(n if ends is None else min(n, ends[sequence]))
                if mass[i] != float("-inf")
            ]
            size = sizes[head] if counts is None else min(sizes[head], counts[sequence])
            expected = smallest(
                [mass[i] for i in there], coverage[head], size, sum(i < forced for i in there)
            )
            assert found[sequence, head, 0].tolist()[: len(expected)] == sorted(
                there[i] for i in expected
            )
            assert set(found[sequence, head, 0].tolist()[len(expected) :]) <= {PAD}


def test_negative_scores_and_not_a_number() -> None:
    scores = torch.tensor([[[-1.0, -5.0, -0.5, 3.0, -0.0, 0.0]]])
    assert best_places(scores, [4], [None], forced=0).tolist() == [[[2, 3, 4, 5]]]
    scores = torch.tensor([[[float("nan"), 1.0, 2.0, 3.0]]])
    places = best_places(scores, [2], [None], forced=1)
    assert places[0, 0, 0] == 0, "a forced entry is taken, whatever it is"


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (30, 30), (100, 300), (65, 130)])
def test_estimate_of_any_heads(q_len: int, k_len: int, window: int | None) -> None:
    """Heads in any order, of unlike last_q, on some of the KV heads; keys of every layout."""
    torch.manual_seed(k_len)
    q = torch.randn(2, q_len, 6, 24).transpose(1, 2)
    k = torch.randn(2, k_len, 3, 24).transpose(1, 2)
    heads, last_q = [5, 0, 4, 1], [10, 64, 10, 3]
    vertical, slash = estimate(q, k, heads, last_q, scale=0.2, window=window)
    for at, (head, asked) in enumerate(zip(heads, last_q, strict=True)):
        last = min(asked, q_len)
        distance = torch.arange(k_len - last, k_len)[:, None] - torch.arange(k_len)
        logits = q[:, head, -last:].double() @ k[:, head // 2].double().transpose(1, 2) * 0.2
        unseen = (distance < 0) | (distance >= (window or k_len))
        weights = logits.masked_fill(unseen, float("-inf")).softmax(-1)
        torch.testing.assert_close(vertical[:, at].double(), weights.sum(1), atol=1e-5, rtol=1e-5)
        by_distance = torch.zeros(2, k_len, dtype=torch.float64)
        by_distance.scatter_add_(
            1, distance.clamp_min(0).flatten().expand(2, -1), weights.flatten(1)
        )
        torch.testing.assert_close(slash[:, at].double(), by_distance, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bytes_of_scratch", [1, 1 << 12, 1 << 30])
def test_little_memory_changes_nothing(
    bytes_of_scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = problem(450, 450)
    patterns = [
        make("vertical_slash", vertical=90, slash=100),
        make("block_sparse", blocks=4, coverage=0.8),
    ] * 2
    expected = LayerPlan(patterns, 2).build(q, k)
    for module in (last_queries, block_sparse):
        monkeypatch.setitem(module._SCRATCH_BYTES, "cpu", bytes_of_scratch)
    assert torch.equal(LayerPlan(patterns, 2).build(q, k).to_mask(), expected.to_mask())
