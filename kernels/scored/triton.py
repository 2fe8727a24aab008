"""Attention that adds up each key's probabilities on the GPU in Triton: a pass of attention, then one over columns.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import triton as attention
from kernels.attention.triton_launch import architecture, split
from kernels.breaker import failure
from kernels.patterns.dense import dense_index
from kernels.triton_calls import KernelCall, run_calls, softmax_factors


@dataclass(frozen=True, kw_only=True)
class Build:
    """How the kernel is built: keys of a program, queries of a step, warps, and steps under way at once."""

    keys: int
    queries: int
    warps: int
    stages: int
    precision: str = "ieee"


def supports(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot serve the call; None where it can. Looks for triton only if the tensors are on a GPU."""
    return attention.supports(q, k, v) or failure(*_build(q))


def _build(q: Tensor) -> tuple[object, ...]:
    """What a build that fails is remembered by."""
    return "scores", str(q.device), q.dtype, q.shape[-1]


def choose(target: str, *, dim: int, itemsize: int) -> Build:
    """The build for an architecture and the padded head dim.

    Untimed: keys stay in shared memory and queries come by, as many bytes of both as let two programs run side by side
    where there is room for that, so that one multiplies while the other makes probabilities.
    """
    if target == "interpreter":
        return Build(keys=32, queries=32, warps=4, stages=1)
    if itemsize == 4:
        keys, queries = (64, 32) if dim <= 64 else (32, 16) if dim <= 128 else (16, 16)
        precision = "tf32x3" if target != "hip" and dim <= 128 else "ieee"
        return Build(keys=keys, queries=queries, warps=4, stages=1 if target == "hip" else 2, precision=precision)
    if target == "hip":
        keys, queries = (64, 64) if dim <= 128 else (64, 32) if dim <= 256 else (32, 16)
        return Build(keys=keys, queries=queries, warps=4, stages=1)
    if dim <= 128:
        return Build(keys=128, queries=64, warps=8, stages=3)
    return Build(keys=64, queries=32 if dim <= 256 else 16, warps=4, stages=3 if dim <= 256 else 2)


def scored_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.scored.scored_attention; any number of queries."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    index = dense_index(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    out, lse = attention.sparse_attention(q, k, v, index, scale=scale, softcap=softcap)
    call, scores = prepare(q, k, lse, scale=scale, softcap=softcap)
    run_calls([call], q.device, *_build(q))
    return out, lse, scores


def prepare(
    q: Tensor, k: Tensor, lse: Tensor, *, scale: float, softcap: float | None, target: str | None = None
) -> tuple[KernelCall, Tensor]:
    """The launch that adds up probabilities by their rows' log-sum-exp (B, H, Q), and the sums (B, G, K) it writes.

    `target` prepares for another architecture than that of q's device.
    """
    (batch, num_heads, q_len, dim), (_, num_kv_heads, k_len, _) = q.shape, k.shape
    target = target or architecture(q.device)
    # A product of fp32 without the matrix units holds whole operands in registers.
    d0, d1 = split(dim, 128 if q.element_size() == 4 else 256)
    build = choose(target, dim=d0 + d1, itemsize=q.element_size())
    scores = torch.empty(batch, num_kv_heads, k_len, dtype=torch.float32, device=q.device)
    strides = {
        f"{name}_{axis}": tensor.stride(i)
        for name, tensor in (("q", q), ("k", k))
        for i, axis in enumerate(("batch", "head", "row"))
    }
    call = KernelCall(
        module=f"{__package__}.triton_kernel",
        kernel="column_sums_kernel",
        grid=(batch * num_kv_heads * -(-k_len // build.keys),),
        arguments={
            "q": q, "k": k, "lse": lse, "scores": scores, **softmax_factors(scale, softcap), **strides,
            "num_kv_heads": num_kv_heads, "group": num_heads // num_kv_heads, "q_len": q_len, "k_len": k_len,
        },
        constants={
            "D": dim, "D0": d0, "D1": d1, "KEYS": build.keys, "QUERIES": build.queries, "STAGES": build.stages,
            "SOFTCAP": softcap is not None, "PRECISION": build.precision,
        },
        options={"num_warps": build.warps, "num_stages": build.stages, "enable_fp_fusion": True},
        plain=softcap is None,
    )  # fmt: skip
    return call, scores
