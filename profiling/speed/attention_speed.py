"""Times sparse attention, its index build and both dense attentions, of right results only.

Shapes: B batch (1 here), H query heads, G KV heads, S length, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from artifacts import HeadwiseError
from kernels.attention import AttentionCall, attend, sparse_attention
from kernels.index import SparseIndex, num_rows
from kernels.patterns import LayerPlan, Pattern, make
from profiling.speed.baselines import KERNEL, MODEL, Speedup, speedup
from profiling.speed.latency import medians, time_calls

# Largest error that still counts as right, in rounding steps of the dtype at the largest output.
_ROUNDING_STEPS = 4
# The fp32 oracle itself lies this far from float64 where logits reach 16: no comparison with it
# says more.
_LEAST_ERROR = 1e-5
# Queries compared with the reference at either end of the prompt.
_CHECKED = 2048
# Share of key columns that draw the attention of every query.
_HEAVY = 1 / 256
# Amplitude of the phase next to noise of 1, and the fraction of the prompt over which its pull
# falls to 1 / e.
_PHASE = 2.0
_REACH = 1 / 64


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of one timed call; dtype by torch's name."""

    length: int
    head_dim: int
    heads: int
    kv_heads: int
    dtype: str
    device: str
    seed: int = 0

    @property
    def dense_flops(self) -> float:
        """Both products over the causal half."""
        return 2.0 * self.length**2 * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One pattern at one size: medians in seconds; flops count computed tiles.

    Attributes:
        sdpa_seconds: torch's fastest dense attention.
        kernel_seconds: Headwise's kernel over every key.
    """

    pattern: str
    sizes: dict[str, int]
    density: float
    tiles: int
    flops: float
    sdpa_seconds: float
    kernel_seconds: float
    sparse_seconds: float
    build_seconds: float

    def over(self, seconds: float) -> Speedup:
        """Speed-up of something that takes so long over each dense attention."""
        return speedup([seconds], {MODEL: [self.sdpa_seconds], KERNEL: [self.kernel_seconds]})


def patterns_for(length: int, density: float) -> list[Pattern]:
    """One pattern of each searched kind, of about that density at that length, and dense."""
    tokens = max(128, round(density * length / 2))
    return [
        make("a_shape", sink=tokens // 4, window=max(64, tokens - tokens // 4)),
        make("vertical_slash", vertical=max(64, tokens * 3 // 4), slash=max(64, tokens // 4)),
        make("block_sparse", blocks=max(2, tokens // 64)),
        make("dense"),
    ]


def paper_patterns() -> list[Pattern]:
    """Patterns of the sizes that MInference 1.0 names (section 3 and Algorithm 1)."""
    return [
        make("a_shape", sink=1024, window=4096),
        make("vertical_slash", vertical=1000, slash=6096),
        make("block_sparse", blocks=100),
    ]


def inputs(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Make q (1, H, S, D), k and v (1, G, S, D): noise, nearness and heavy columns.

    A phase makes logits fall with distance, a shared direction makes some keys heavy. In plain
    noise the best diagonals lie scattered, each in two tiles of every row: vertical-slash would be
    timed at a density that no model has.
    """
    length = size.length
    generator = torch.Generator(size.device).manual_seed(size.seed)

    def noise(heads: int, dim: int = size.head_dim) -> Tensor:
        return torch.randn(
            1, heads, length, dim, generator=generator, device=size.device, dtype=torch.float32
        )

    half = size.head_dim // 2
    # Cosines at the quantiles of a Cauchy distribution add up to about exp(-distance / reach).
    share = (torch.arange(half, device=size.device, dtype=torch.float32) + 0.5) / half
    frequencies = (share * (torch.pi / 2)).tan() / (_REACH * length)
    angles = torch.arange(length, device=size.device)[:, None] * frequencies
    phase = torch.zeros(length, size.head_dim, device=size.device, dtype=torch.float32)
    phase[:, :half], phase[:, half : 2 * half] = _PHASE * angles.cos(), _PHASE * angles.sin()
    direction = (
        torch.nn.functional.normalize(noise(1, size.head_dim)[:, :, :1], dim=-1)
        * size.head_dim**0.5
    )
    heavy = (
        torch.rand(length, 1, generator=generator, device=size.device, dtype=torch.float32) < _HEAVY
    )
    dtype = getattr(torch, size.dtype)
    q = (noise(size.heads) + phase + direction / 2).to(dtype)
    k = (noise(size.kv_heads) + phase + direction * heavy).to(dtype)
    return q, k, noise(size.kv_heads).to(dtype)


def measure(size: Size, patterns: Sequence[Pattern], *, repeats: int) -> list[Speed]:
    """Time every pattern and both dense attentions, interleaved in one run.

    Raises:
        HeadwiseError: a result is not that of the fp32 reference.
    """
    q, k, v = inputs(size)
    runs = _dense(q, k, v)
    by_torch = list(runs)
    indices = []
    every = LayerPlan([make("dense")] * size.heads, size.kv_heads).build(q, k)
    check(sparse_attention(q, k, v, every), q, k, v, every, "headwise")
    runs["every key"] = lambda: sparse_attention(q, k, v, every)
    for i, pattern in enumerate(patterns):
        plan = LayerPlan([pattern] * size.heads, size.kv_heads)
        index = plan.build(q, k)
        indices.append(index)
        check(sparse_attention(q, k, v, index), q, k, v, index, "headwise")
        runs[f"sparse {i}"] = lambda index=index: sparse_attention(q, k, v, index)  # type: ignore[misc]
        runs[f"build {i}"] = lambda plan=plan: plan.build(q, k)  # type: ignore[misc]
    seconds = medians(time_calls(runs, repeats=repeats, device=size.device))
    return [
        Speed(
            pattern=pattern.kind,
            sizes={name: value for name, value in vars(pattern).items() if isinstance(value, int)},
            density=index.density().mean().item(),
            tiles=int(index.computed_tiles().sum()),
            flops=float(index.flops(size.head_dim).sum()),
            sdpa_seconds=min(seconds[name] for name in by_torch),
            kernel_seconds=seconds["every key"],
            sparse_seconds=seconds[f"sparse {i}"],
            build_seconds=seconds[f"build {i}"],
        )
        for i, (pattern, index) in enumerate(zip(patterns, indices, strict=True))
    ]


def _dense(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Dense attention of torch; on a GPU each kernel that takes the call."""

    def sdpa() -> Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=True, enable_gqa=True)

    runs: dict[str, Callable[[], object]] = {}
    backends: tuple[Any, ...] = ()
    if q.device.type == "cuda":
        backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for backend in backends:

        def run(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return sdpa()

        with suppress(RuntimeError):
            run()
            runs[f"dense, {backend.name}"] = run
    return runs or {"dense": sdpa}


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, index: SparseIndex, name: str) -> None:
    """Compare the first head's first and last queries with the fp32 reference.

    Raises:
        HeadwiseError: the largest error, and what rounding would explain.
    """
    count = min(_CHECKED, index.q_len)
    first_head = replace(
        index,
        diagonals=index.diagonals[:, :1],
        columns=index.columns[:, :1],
        offsets=index.offsets[:, :1],
    )
    if index.skip is None:
        skip = None
    else:
        skip = index.skip[:, :1].contiguous()
    first_head = replace(first_head, skip=skip)
    rows = num_rows(count, index.k_len)
    # Length, index and the place in q of the queries compared.
    ends = [
        (
            count,
            replace(
                first_head,
                q_len=count,
                k_len=count,
                offsets=first_head.offsets[:, :, : num_rows(count, count) + 1],
            ),
            slice(0, count),
        ),
        (
            index.k_len,
            replace(first_head, q_len=count, offsets=first_head.offsets[:, :, -rows - 1 :]),
            slice(-count, None),
        ),
    ]
    for k_len, part, queries in ends:
        keys = k[:, :1, :k_len].float()
        values = v[:, :1, :k_len].float()
        call = AttentionCall(q[:, :1, queries].float(), keys, values, part)
        expected, _ = attend(call, "reference")
        error = float((out[:, :1, queries].float() - expected).abs().max())
        allowed = max(
            _ROUNDING_STEPS * torch.finfo(out.dtype).eps * max(1.0, float(expected.abs().max())),
            _LEAST_ERROR,
        )
        if not error <= allowed:
            raise HeadwiseError(
                f"{name} is wrong: largest error {error:.3g}, allowed {allowed:.3g}; no speed is "
                f"shown"
            )
