"""Block-sparse by means of 16 positions: every backend chooses what plain sums say.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from torch import Tensor

from kernels.index import PAD, TILE
from kernels.patterns import LayerPlan, Pattern, make
from tests.conformance.builder_cases import Build, paged
from tests.kernels.compiling import TARGETS, compile_pools
from tests.processes import interpret
from tests.sampling import sampled

# Of unlike pools; a coverage counts the own tile's mass.
LAYER = (
    make("block_sparse", blocks=5, pool=16),
    make("block_sparse", blocks=4),
    make("block_sparse", blocks=7, pool=16),
    make("block_sparse", blocks=9, pool=16, coverage=0.6),
)
# Queries, keys, window.
SHAPES = (
    (1, 1, None),
    (5, 70, None),
    (9, 125, None),
    (300, 300, None),
    (257, 700, None),
    (500, 900, 200),
    (130, 1025, 64),
)


def inputs(q_len: int, k_len: int, dim: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(q_len + k_len)
    return torch.randn(2, 4, q_len, dim), torch.randn(2, 2, k_len, dim)


def masses(
    q: Tensor, k: Tensor, pool: int, scale: float, reach: int
) -> dict[int, dict[int, float]]:
    """Of one head, by query tile, the mass of each key tile; q (Q, D), k (K, D)."""
    k_len = len(k)
    before = k_len - len(q)
    found: dict[int, dict[int, float]] = {}
    for block in range(before // pool, -(-k_len // pool)):
        start = max(block * pool - before, 0)
        mean = q[start : (block + 1) * pool - before].double().mean(0)
        row = block * pool // TILE
        seen = range(max(row - reach, 0) * TILE // pool, block + 1)
        keys = torch.stack([k[at * pool : (at + 1) * pool].double().mean(0) for at in seen])
        weights = (keys @ mean * scale).softmax(0).tolist()
        tiles = found.setdefault(row, {})
        for at, weight in zip(seen, weights, strict=True):
            tile = at * pool // TILE
            tiles[tile] = tiles.get(tile, 0.0) + weight
    return found


def chosen(tiles: dict[int, float], row: int, blocks: int, coverage: float | None) -> set[int]:
    """Tiles that a row takes next to its own."""
    kept = [tile for tile in (row, 0) if tile in tiles]
    kept = list(dict.fromkeys(kept))
    goal = float("inf") if coverage is None else coverage * sum(tiles.values())
    others = sorted(set(tiles) - set(kept), key=lambda tile: -tiles[tile])
    for tile in others:
        if len(kept) >= blocks or sum(tiles[each] for each in kept) >= goal:
            break
        kept.append(tile)
    return set(kept) - {row}


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(("q_len", "k_len", "window"), SHAPES)
def test_the_tiles_are_those_of_most_mass(q_len: int, k_len: int, window: int | None) -> None:
    q, k = inputs(q_len, k_len)
    plan = LayerPlan(LAYER, 2)
    index = plan.build(q, k, scale=0.6, window=window)
    reach = k_len if window is None else -(-(window - 1) // TILE)
    for b in range(2):
        for head in (0, 2, 3):
            pattern = vars(LAYER[head])
            rows = masses(q[b, head], k[b, head // 2], pattern["pool"], 0.6, reach)
            for row, tiles in rows.items():
                listed = index.listed()[b, head, row - (k_len - q_len) // TILE]
                expected = chosen(tiles, row, pattern["blocks"], pattern["coverage"])
                assert set(listed[listed != PAD].tolist()) == expected


@pytest.mark.usefixtures("builder")
def test_heads_of_unlike_pools_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are built one after the other, and in rows some at a time."""
    monkeypatch.setattr("kernels.patterns.block_sparse._SCRATCH_BYTES", {"cpu": 1 << 16})
    q, k = inputs(700, 1100)
    together = LayerPlan(LAYER, 2).build(q, k).to_mask()
    for head, pattern in enumerate(LAYER):
        alone = LayerPlan([pattern] * 4, 2).build(q, k).to_mask()
        assert torch.equal(together[:, head], alone[:, head])


@pytest.mark.usefixtures("builder")
@pytest.mark.parametrize(
    "case",
    [
        Build(q_len=100, k_len=300, page=37),
        Build(q_len=257, k_len=257, page=64),
        Build(q_len=100, k_len=300, page=16, cache=torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_pages_give_what_a_tensor_gives(case: Build) -> None:
    assert not differing_in_pages(case)


def differing_in_pages(case: Build) -> int:
    """Number of listed tiles that differ between pages and a tensor."""
    q, k = inputs(case.q_len, case.k_len, 32)
    q, k = q[:1].to(case.dtype), k[:1].to(case.cache or case.dtype).to(case.dtype)
    where = paged(k, case)
    plan = LayerPlan(LAYER, 2)
    index = plan.build(q, where.cache, block_table=where.table, k_len=case.k_len)
    return int((index.tiles != plan.build(q, k).tiles).sum())


@pytest.mark.parametrize("pool", [0, 8, True, "16"])
def test_other_pools_are_refused(pool: object) -> None:
    with pytest.raises(ValueError, match=f"pool must be one of 64, 16, got {pool!r}"):
        make("block_sparse", blocks=3, pool=pool)


def differences(patterns: tuple[Pattern, ...], device: torch.device, dim: int) -> tuple[int, int]:
    """Listed tiles of all shapes, and those among them that Triton does not list as torch does."""
    total = 0
    differing = 0
    plan = LayerPlan(patterns, 2)
    for q_len, k_len, window in SHAPES:
        q, k = (x.to(device).half() for x in inputs(q_len, k_len, dim))
        with mock.patch("kernels.patterns.cpu.serves", return_value=False):
            found = plan.build(q, k, window=window)
            with mock.patch("kernels.patterns.triton._built", return_value=False):
                expected = plan.build(q, k, window=window)
        total += expected.tiles.numel()
        differing += int((found.tiles != expected.tiles).sum())
    return total, differing


def interpreted() -> dict[str, int]:
    """Faults of Triton's builders on the CPU, by name."""
    from tests.conformance.triton_memory import memory_checked

    device = torch.device("cpu")
    found = {}
    with memory_checked() as launched:
        for dim in (16, 80):
            total, found[f"D {dim}"] = differences(LAYER, device, dim)
            assert total > 500
        with mock.patch("kernels.patterns.cpu.serves", return_value=False):
            found["pages"] = differing_in_pages(Build(q_len=100, k_len=300, page=37))
    assert {"means_kernel", "tile_masses_kernel"} <= set(launched)
    return found


@pytest.mark.slow
def test_interpreted_kernels_choose_as_torch_does() -> None:
    """Scores of random means are not that close: none may differ."""
    assert set(interpret("tests.kernels.test_pool").values()) == {0}


@pytest.mark.parametrize(
    ("target", "dim"),
    sampled(
        [(target, dim) for target in TARGETS for dim in (64, 80, 256)],
        ("sm_90", 64),
        ("gfx942", 256),
    ),
)
def test_kernels_compile_without_spills(target: str, dim: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    for name, build in compile_pools(target, head_dim=dim).items():
        assert build.spilled == 0 and build.shared <= TARGETS[target][1], name


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_a_gpu_chooses_as_torch_does_there(dim: int) -> None:
    """Sums have another order: one tile in a hundred may differ."""
    total, differing = differences(LAYER, torch.device("cuda", 0), dim)
    assert differing <= total / 100


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpreted()))
