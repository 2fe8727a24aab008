"""Cases of the builders in Triton, estimate and choice, small enough to interpret.

Shapes: B batch, h heads of one kind, H query heads, G KV heads, Q query length, K key length, D
head dim."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from kernels.index import PAD
from kernels.patterns import triton
from kernels.patterns.block_sparse import mean_of_tiles
from kernels.patterns.choose import best_places
from kernels.patterns.last_queries import estimate
from tests.kernels import paged_builds

# Of masses of up to 1: the sums have another order.
ERROR = 1e-5


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`heads` are those asked for, each by its number in `last_q`."""

    q_len: int
    k_len: int
    heads: tuple[int, ...]
    last_q: tuple[int, ...]
    batch: int = 1
    num_heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    window: int | None = None
    dtype: torch.dtype = torch.float16
    transposed: bool = False


ESTIMATES = {
    "estimate of a layer": Estimate(q_len=200, k_len=200, heads=(0, 1, 2, 3), last_q=(64,) * 4,
    kv_heads=2),
    "estimate of some heads, batch 2, D 80": Estimate(
        q_len=70, k_len=301, heads=(0, 2, 3, 4, 5), last_q=(64, 64, 16, 64, 64), batch=2,
        num_heads=6, kv_heads=2,
        head_dim=80, transposed=True,
    ),
    "estimate of heads of unlike numbers": Estimate(
        q_len=300, k_len=300, heads=(1, 3, 0), last_q=(200, 130, 1), kv_heads=4
    ),
    "estimate of 256 queries, chunks of two tiles": Estimate(
        q_len=256, k_len=4200, heads=(0, 1), last_q=(256, 64), num_heads=2, head_dim=16
    ),
    "estimate of more queries than there are": Estimate(q_len=5, k_len=70, heads=(1,),
    last_q=(64,)),
    "estimate of wide heads": Estimate(q_len=64, k_len=130, heads=(0, 3), last_q=(64, 64),
    head_dim=160),
    **{
        f"estimate in a window of {window}": Estimate(
            q_len=200, k_len=400, heads=(0, 1, 3), last_q=(64, 130, 64), window=window, head_dim=32
        )
        for window in (1, 64, 65, 200, 1000)
    },
}  # fmt: skip


def estimate_error(case: Estimate, device: torch.device) -> tuple[float, float]:
    """Largest absolute errors of both masses against torch's of the same inputs in fp32."""
    torch.manual_seed(0)
    q, k = (
        torch.randn(case.batch, heads, length, case.head_dim, device=device).to(case.dtype)
        for heads, length in ((case.num_heads, case.q_len), (case.kv_heads, case.k_len))
    )
    if case.transposed:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    how = {"scale": 2 * case.head_dim**-0.5, "window": case.window}
    # What is left is Triton for half precision and torch for the rest.
    with mock.patch("kernels.patterns.cpu.serves", return_value=False):
        found = estimate(q, k, case.heads, case.last_q, **how)
        expected = estimate(q.float(), k.float(), case.heads, case.last_q, **how)
    errors = [
        float((a - b).abs().nan_to_num(nan=float("inf")).max())
        for a, b in zip(found, expected, strict=True)
    ]
    return errors[0], errors[1]


# Shape of what is pooled (B, H, length, D), the heads asked for, and positions that the first tile
# lacks.
MEANS: dict[str, tuple[tuple[int, int, int, int], tuple[int, ...], int]] = {
    "means of a token": ((1, 1, 1, 64), (0,), 0),
    "means of whole tiles": ((1, 2, 128, 64), (0, 1), 0),
    "means, 5 missing, D 80, batch 2": ((2, 4, 300, 80), (0, 2, 3), 5),
    "means, all but one missing, D 160": ((1, 3, 130, 160), (1, 2), 63),
    "means of heads asked for twice": ((2, 3, 70, 32), (0, 0, 2, 2, 2), 0),
    "means of less than is missing": ((1, 1, 3, 16), (0,), 10),
}


def means_error(name: str, device: torch.device) -> tuple[float, float]:
    """The largest absolute error of means against torch's of the same inputs in fp32."""
    shape, heads, lead = MEANS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).half()
    with mock.patch("kernels.patterns.cpu.serves", return_value=False):
        found, expected = (mean_of_tiles(each, heads, lead=lead) for each in (x, x.float()))
    assert triton.serves(x) and found.shape == expected.shape
    return float((found - expected).abs().max().nan_to_num(nan=float("inf"))), 0.0


# Shape of the scores (B, h, ..., n), how many each head takes, how many are forced. Several
# sequences also ragged.
CHOICES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "choice of 1": ((1, 2, 3, 1), (1, 4), 1),
    "choice of 65": ((2, 3, 1, 65), (1, 20, 70), 1),
    "choice of 130": ((1, 2, 4, 130), (128, 3), 2),
    "choice of 7 columns": ((2, 2, 7), (3, 2), 64),
    "choice of 4200, ragged": ((5, 2, 4200), (700, 64), 0),
    "choice of 700 columns": ((1, 3, 700), (5, 64, 300), 64),
    "choice of 5000": ((1, 2, 2, 5000), (100, 4990), 1),
    "choice of 70000": ((1, 1, 70_000), (1000,), 64),
}


def choice_error(name: str, device: torch.device) -> tuple[float, float]:
    """Places that differ from torch's stable choice, among ties and -inf; and those with NaN."""
    shape, sizes, forced = CHOICES[name]
    torch.manual_seed(0)
    # Adding 0 makes 0 of -0.
    scores = (torch.randn(shape) * 4).round() / 4 + 0
    scores[torch.rand(shape) < 0.3] = float("-inf")
    how = {"coverage": [None] * len(sizes), "forced": forced}
    differing, wild = 0, 0
    for ragged in (False, True) if shape[0] > 1 else (False,):
        ends, counts = torch.tensor(
            [[shape[-1], 3, 0, shape[-1] - 1, 5000], [5000, 2, 9, 0, 65]], dtype=torch.int32
        )
        each = {"ends": ends[: shape[0]], "counts": counts[: shape[0]]} if ragged else {}
        there = {name: x.to(device) for name, x in each.items()}
        with mock.patch("kernels.patterns.cpu.serves", return_value=False):
            found = best_places(scores.to(device), sizes, **how, **there).cpu()
            poisoned = scores.masked_fill(torch.rand(shape) < 0.2, float("nan"))
            taken = best_places(poisoned.to(device), sizes, **how, **there).cpu()
            with mock.patch("kernels.patterns.triton.chooses", return_value=False):
                expected = best_places(scores, sizes, **how, **each)
        differing += int((found != expected).sum())
        wild += _wild(taken, poisoned)
    return float(differing), float(wild)


def _wild(taken: Tensor, poisoned: Tensor) -> int:
    """Places taken that hold NaN or are none."""
    wild = (taken != PAD) & poisoned.gather(
        -1, taken.clamp(max=poisoned.shape[-1] - 1).long()
    ).isnan()
    return int((wild | (taken < 0)).sum())


# Layers whose keys lie in pages: of each sort that the kernels tell apart.
PAGED = {
    f"pages: {name}": paged_builds.CASES[name]
    for name in (
        "100 of 300, pages of 16", "257 of 257, pages of 64", "64 of 450, pages of 128",
        "100 of 300, pages of 37",
        "257 of 257, pages of 100", "a token", "batch 2, one KV head, D 80",
        "batch 2, pages of 1,000",
        "window of 65, pages of 192", "keys and values of a page in turn", "bfloat16", "D 160",
        "float8_e4m3fn read in float16", "float8_e5m2 read in float16",
    )
}  # fmt: skip


def paged_error(name: str, device: torch.device) -> tuple[float, float]:
    """Numbers of masses and means, and entries of an index, that dense keys do not give."""
    with mock.patch("kernels.patterns.cpu.serves", return_value=False):
        found = paged_builds.differences(PAGED[name], device)
        # Torch would have served in its place, unnoticed.
        assert triton.serves(torch.empty(1, dtype=torch.float16, device=device))
    read = sum(abs(found.pop(part)) for part in ("vertical", "slash", "means"))
    return float(read), float(sum(map(abs, found.values())))
