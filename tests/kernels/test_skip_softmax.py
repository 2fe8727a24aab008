"""Skip-softmax: tiles skipped by the definition, and a bounded loss; engines: tests/conformance.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, R query tiles,
N key tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.index import TILE, SparseIndex, num_tiles
from kernels.joining import cat_heads
from kernels.patterns import LayerPlan, make
from kernels.ragged import Ragged


@dataclass(frozen=True, kw_only=True)
class Case:
    q_len: int
    k_len: int
    heads: int = 3
    kv_heads: int = 1
    dim: int = 32
    softcap: float | None = None
    window: int | None = None
    tail: int = 0
    # Kinds that the tiles of heads come from, round and round.
    kinds: tuple[str, ...] = ("dense",)


CASES = {
    "square": Case(q_len=700, k_len=700),
    "100 of 777": Case(q_len=100, k_len=777, heads=4, kv_heads=2),
    "D 80, window": Case(q_len=500, k_len=900, dim=80, window=300),
    "tail, soft-cap": Case(q_len=450, k_len=450, tail=70, softcap=20.0),
    "lists and columns": Case(
        q_len=640, k_len=640, heads=4, kinds=("block_sparse", "vertical_slash")
    ),
}
MADE = {
    "dense": make("dense"),
    "block_sparse": make("block_sparse", blocks=5),
    "vertical_slash": make("vertical_slash", vertical=100, slash=200),
}


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, H, Q, D), k and v (1, G, K, D): tiles of keys that all queries want more or less of."""
    torch.manual_seed(case.q_len)
    want = torch.randn(case.dim)
    q = torch.randn(1, case.heads, case.q_len, case.dim) + want
    strength = torch.randn(1, case.kv_heads, num_tiles(case.k_len), 1).repeat_interleave(TILE, 2)[
        :, :, : case.k_len
    ]
    k = 0.5 * torch.randn(1, case.kv_heads, case.k_len, case.dim) + 2 * strength * want
    q, k, v = (x.to(dtype) for x in (q, k, torch.randn(1, case.kv_heads, case.k_len, case.dim)))
    return q, k, v


def plain(case: Case, q: Tensor, k: Tensor) -> SparseIndex:
    patterns = [MADE[case.kinds[head % len(case.kinds)]] for head in range(case.heads)]
    return LayerPlan(patterns, case.kv_heads, dense_tail=case.tail).build(q, k, window=case.window)


def logits_of(case: Case, q: Tensor, k: Tensor) -> Tensor:
    """(H, Q, K) fp64."""
    keys = k[0].double().repeat_interleave(case.heads // case.kv_heads, 0)
    logits = q[0].double() @ keys.transpose(1, 2) * case.dim**-0.5
    return logits if case.softcap is None else case.softcap * (logits / case.softcap).tanh()


def gaps(case: Case, index: SparseIndex, logits: Tensor) -> dict[tuple[int, int, int], float]:
    """Distance of a row's best query from its anchor, by head, row and tile that may be skipped.

    By the words of kernels.index, without a look at what the kernels do.
    """
    mask = index.to_mask()[0]
    found = {}
    for head in range(case.heads):
        columns = set(index.columns[0, head].tolist())
        for row in range(index.num_rows):
            at = index.first_row + row
            if at >= index.first_dense()[head]:
                continue
            queries = slice(
                max(at * TILE - (case.k_len - case.q_len), 0),
                (at + 1) * TILE - (case.k_len - case.q_len),
            )
            seen = logits[head, queries].masked_fill(~mask[head, queries], -math.inf)
            tiles = {at - d for d in index.diagonals[0, head].tolist()} | set(
                index.listed()[0, head, row].tolist()
            )
            tiles = {t for t in tiles if max(0, at - index.reach) <= t <= at}
            kept = [
                j
                for j in range(case.k_len)
                if j // TILE in {0, at} & tiles or (j in columns and j // TILE not in tiles)
            ]
            anchor = seen[:, kept].amax(-1)
            for tile in tiles - {0, at}:
                best = seen[:, tile * TILE : (tile + 1) * TILE].amax(-1) - anchor
                found[head, row, tile] = float(best.max())
    return found


def bounds_between(found: dict[tuple[int, int, int], float], heads: int) -> list[float]:
    """A bound for each head in the widest space between two gaps of the middle half; -inf: none."""
    bounds = []
    for head in range(heads):
        below = sorted(gap for (h, _, _), gap in found.items() if h == head and -30 < gap < 0)
        some = below[len(below) // 4 : max(3 * len(below) // 4, 2)]
        spaces = [(b - a, (a + b) / 2) for a, b in pairwise(some)]
        bounds.append(max(spaces)[1] if spaces else -math.inf)
    return bounds


def expected_of(
    case: Case, index: SparseIndex, logits: Tensor, v: Tensor, out_of: set[tuple[int, int, int]]
) -> tuple[Tensor, Tensor]:
    """Softmax over the mask without the tiles `out_of`, (H, Q, D), and their mass (H, Q)."""
    mask = index.to_mask()[0]
    without = mask.clone()
    for head, row, tile in out_of:
        at = index.first_row + row
        queries = slice(
            max(at * TILE - (case.k_len - case.q_len), 0),
            (at + 1) * TILE - (case.k_len - case.q_len),
        )
        without[head, queries, tile * TILE : (tile + 1) * TILE] = False
    values = v[0].double().repeat_interleave(case.heads // case.kv_heads, 0)
    lost = (logits.masked_fill(~mask, -math.inf).softmax(-1) * ~without).sum(-1)
    return logits.masked_fill(~without, -math.inf).softmax(-1) @ values, lost


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_skips_what_the_definition_says(name: str, backend: str) -> None:
    case = CASES[name]
    q, k, v = inputs(case)
    index, logits = plain(case, q, k), logits_of(case, q, k)
    found = gaps(case, index, logits)
    bounds = bounds_between(found, case.heads)
    out_of = {place for place, gap in found.items() if gap < bounds[place[0]]}
    assert len(out_of) > len(found) // 10
    expected, lost = expected_of(case, index, logits, v, out_of)
    # Of each key left out the weight is at most exp(bound) of the largest one.
    assert bool((lost <= torch.tensor(bounds).exp()[:, None] * case.k_len).all())
    index = replace(index, skip=torch.tensor([bounds]))
    skipped = torch.zeros(1, case.heads, dtype=torch.int32)
    out = sparse_attention(q, k, v, index, backend=backend, softcap=case.softcap, skipped=skipped)
    assert skipped[0].tolist() == [
        sum(h == head for h, _, _ in out_of) for head in range(case.heads)
    ]
    torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=1e-5)


def test_a_bound_at_a_gap_costs_no_more_than_the_threshold() -> None:
    """A tile exactly at the threshold: rounding decides, and the loss is within it."""
    case = CASES["square"]
    q, k, v = inputs(case)
    index, logits = plain(case, q, k), logits_of(case, q, k)
    found = gaps(case, index, logits)
    middle = [
        sorted(g for (h, _, _), g in found.items() if h == head and g < 0)[10]
        for head in range(case.heads)
    ]
    index = replace(index, skip=torch.tensor([middle]))
    results = [
        sparse_attention(q, k, v, index, backend=backend) for backend in ("reference", "cpu")
    ]
    most = v.abs().max() * torch.tensor(middle).exp()[:, None, None] * TILE * 2 + 1e-5
    assert bool(((results[0] - results[1])[0].abs() <= most).all())


def test_sequences_of_a_batch_have_each_their_own_threshold() -> None:
    case = CASES["square"]
    q, k, v = inputs(case)
    ragged = Ragged.packed([0, 300, 700], [0, 300, 700])
    plan = LayerPlan([make("skip_softmax", scale_factor=20.0)] * 3, 1)
    index = plan.build(q, k, ragged=ragged)
    assert index.skip is not None and index.skip[:, 0].tolist() == pytest.approx(
        [math.log(20 / 300), math.log(20 / 400)]
    )
    skipped = torch.zeros(2, 3, dtype=torch.int32)
    out = sparse_attention(q, k, v, index, skipped=skipped)
    for s, part in enumerate((slice(0, 300), slice(300, 700))):
        own = torch.zeros(1, 3, dtype=torch.int32)
        one = [x[:, :, part] for x in (q, k, v)]
        alone = sparse_attention(*one, plan.build(*one[:2]), skipped=own, backend="reference")
        assert torch.equal(own[0], skipped[s]) and int(own.sum()) > 0
        assert torch.allclose(out[:, :, part], alone, atol=1e-5)


def test_heads_without_a_bound_and_short_prompts_skip_nothing() -> None:
    q, k, v = inputs(CASES["square"])
    skips = LayerPlan([make("skip_softmax", scale_factor=30.0)] * 2, 1).build(q[:, :2], k)
    dense = LayerPlan([make("dense")], 1).build(q[:, :1], k)
    order = [2, 0, 1]
    index = cat_heads([skips, dense], torch.tensor(order), order)
    assert index.skip is not None and index.skip[0, 0] == -math.inf
    skipped = torch.zeros(1, 3, dtype=torch.int32)
    sparse_attention(q, k, v, index, skipped=skipped)
    assert skipped[0, 0] == 0 and bool((skipped[0, 1:] > 0).all())
    short = LayerPlan([make("skip_softmax", scale_factor=700.0)] * 3, 1).build(q, k)
    assert torch.equal(
        sparse_attention(q, k, v, short), sparse_attention(q, k, v, replace(short, skip=None))
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_not_finite_is_never_taken_for_low(backend: str) -> None:
    """A query that is NaN can do without no tile: its row is computed whole."""
    case = CASES["square"]
    q, k, v = inputs(case)
    index = replace(plain(case, q, k), skip=torch.full((1, 3), -3.0))
    before, after = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    sparse_attention(q, k, v, index, backend=backend, skipped=before)
    q[0, 1, 650] = math.nan
    out = sparse_attention(q, k, v, index, backend=backend, skipped=after)
    assert after[0, 0] == before[0, 0] and after[0, 1] < before[0, 1]
    assert bool(out[0, 1, 650].isnan().all()) and not bool(out[0, 1, :640].isnan().any())
