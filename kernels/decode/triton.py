"""Decode over all or chosen keys on the GPU in Triton: checks, prepares and launches a call.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim, R = Q * H / G query rows of a KV head, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import triton as attention
from kernels.attention.triton_launch import (
    architecture,
    combine,
    dtype_unsupported,
    multiprocessors,
    precision_of_float32,
    split,
    unavailable,
)
from kernels.call import (
    MAX_QUERIES,
    AttentionCall,
    DecodeCall,
    Decoded,
    Operands,
    derivative_wanted,
)
from kernels.copies import with_rows
from kernels.logits import Logits
from kernels.patterns.dense import dense_index
from kernels.registry import build_failure
from kernels.triton_calls import KernelCall, or_placeholder, run_calls, softmax_factors

_MODULE = f"{__package__}.triton_kernel"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_DIM = 512
# A split shorter than this costs more to combine than it saves, and so do more of them than this.
_FEWEST_KEYS = 256
_MOST_SPLITS = 256
_SCORED = 512


@dataclass(frozen=True, kw_only=True)
class SumsBuild:
    """A build of column_sums_kernel: keys of a program, queries of a step, warps, steps at once."""

    keys: int
    queries: int
    warps: int
    stages: int
    precision: str = "ieee"


@dataclass(frozen=True, kw_only=True)
class Build:
    """A build of the split kernel: query rows, keys of a step, warps, steps at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    precision: str = "ieee"


def supports(call: Operands) -> str | None:
    """The reason why this backend cannot serve the call; None where it can.

    Looks for triton only if the tensors are on a GPU.
    """
    q = call.q
    v = call.v
    if q.shape[2] > MAX_QUERIES:
        return attention.supports(call) or build_failure(*_sums_build(q))
    if reason := unavailable(q.device):
        return reason
    if q.dtype not in _DTYPES:
        return f"it serves float32, float16 and bfloat16, not {q.dtype}"
    if (widest := max(q.shape[-1], v.shape[-1])) > _MAX_DIM:
        return f"it serves head dims up to {_MAX_DIM}, not {widest}"
    return dtype_unsupported(call.k) or derivative_wanted(call) or build_failure(*_build(q, v))


def _build(q: Tensor, v: Tensor) -> tuple[object, ...]:
    """Key under which a failed build is remembered."""
    return "decode", str(q.device), q.dtype, v.dtype, q.shape[-1], v.shape[-1]


def select_build(target: str, *, dim: int, itemsize: int, rows: int) -> Build:
    """The build for an architecture, the larger padded head dim and the query rows of a KV head.

    Untimed: about 48 KiB of keys and values in flight, so that two programs or more fit a
    multiprocessor and together saturate its part of the memory's bandwidth; as many query rows as
    the registers hold.
    """
    limit = 64
    if dim > 128:
        limit = 32
    rows = min(max(16, _power_of_two(rows)), limit)
    warps = 4
    if rows > 32:
        warps = 8
    if target == "interpreter":
        return Build(rows=rows, keys=32, warps=warps, stages=1)
    if target == "hip":
        if dim * itemsize <= 256:
            return Build(rows=rows, keys=32, warps=warps, stages=2)
        return Build(rows=rows, keys=16, warps=warps, stages=1)
    if itemsize == 4:
        precision = precision_of_float32(target, dim)
        return Build(rows=rows, keys=16, warps=warps, stages=2, precision=precision)
    keys = 32
    if dim <= 64:
        keys = 64
    return Build(rows=rows, keys=keys, warps=warps, stages=3)


def occupancy(build: Build, *, dim: int, tokens: bool, paged: bool) -> int:
    """Programs of a build per multiprocessor: as many as fit, so that there is one wave.

    Look-ups for each key take registers. Two programs have enough loads in flight to use all of the
    memory's bandwidth.
    """
    if build.warps > 4 or dim > 128:
        return 2
    return 4 - tokens - paged


def run(call: DecodeCall, *, splits: int | None = None) -> Decoded:
    """Results of a call; see `prepare`."""
    if call.is_prompt:
        return _with_sums(call)
    launches, decoded = prepare(call, splits=splits)
    run_calls(launches, call.q.device, *_build(call.q, call.v))
    return decoded


def prepare(call: DecodeCall, *, splits: int | None = None) -> tuple[list[KernelCall], Decoded]:
    """The launches that serve a call, and the results that they write.

    `splits` replaces the number of splits that suits the device.
    """
    tokens = call.tokens
    starts = call.starts
    ends = call.ends
    softcap = call.logits.softcap
    window = call.logits.window
    scores = call.scores
    block_table = call.block_table
    q, k, v = map(with_rows, (call.q, call.k, call.v))
    (batch, num_heads, q_len, dim) = q.shape
    v_dim = v.shape[-1]
    paged = block_table is not None
    # Where both layouts keep (batch or page, head, row).
    order = (0, 1, 2)
    page = 0
    pages_width = 0
    if block_table is not None:
        order = (0, 2, 1)
        page = k.shape[1]
        pages_width = block_table.shape[1]
    num_kv_heads = k.shape[order[1]]
    if paged:
        k_len = pages_width * page
    else:
        k_len = k.shape[2]
    if tokens is None:
        places = k_len
    else:
        places = tokens.shape[-1]
    rows = num_heads // num_kv_heads * q_len
    block_d, block_e = (max(16, _power_of_two(x)) for x in (dim, v_dim))
    target = architecture(q.device)
    build = select_build(target, dim=max(block_d, block_e), itemsize=q.element_size(), rows=rows)
    programs = batch * num_kv_heads * -(-rows // build.rows)
    seen = places
    if window is not None and tokens is None:
        seen = min(places, window + q_len - 1)
    held = occupancy(build, dim=max(block_d, block_e), tokens=tokens is not None, paged=paged)
    at_once = held * multiprocessors(q.device)
    splits = splits or max(1, min(at_once // programs, seen // _FEWEST_KEYS, _MOST_SPLITS))

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    heads = (batch, num_kv_heads)
    out = torch.empty(batch, q_len, num_heads, v_dim, dtype=q.dtype, device=q.device).transpose(
        1, 2
    )
    lse = empty(batch, num_heads, q_len)
    tops = empty(*heads, splits, rows)
    totals = empty(*heads, splits, rows)
    partial = empty(*heads, splits, rows, v_dim)
    if scores == "none":
        mass = None
    else:
        mass = empty(*heads, places)
    if mass is None:
        logits = totals
    else:
        logits = empty(*heads, rows, places)

    listed = lse
    tokens_batch = 0
    tokens_head = 0
    if tokens is not None:
        if tokens.dim() == 2:
            tokens = tokens[:, None].expand(-1, num_kv_heads, -1)
        listed = with_rows(tokens)
        tokens_batch = listed.stride(0)
        tokens_head = listed.stride(1)
    bounds = {"starts": or_placeholder(starts, lse), "ends": or_placeholder(ends, lse)}
    sizes = {
        "num_kv_heads": num_kv_heads, "rows": rows, "q_len": q_len, "k_len": k_len,
        "places": places,
        "window": window or 0,
    }  # fmt: skip
    which = {
        "TOKENS": tokens is not None, "STARTS": starts is not None, "ENDS": ends is not None,
        "WINDOW": window is not None,
    }  # fmt: skip
    strides = {
        f"{name}_{axis}": tensor.stride(i)
        for name, tensor, axes in (("q", q, (0, 1, 2)), ("k", k, order), ("v", v, order))
        for axis, i in zip(("batch", "head", "row"), axes, strict=True)
    }
    split = KernelCall(
        module=_MODULE,
        kernel="split_kernel",
        grid=(programs, splits),
        arguments={
            "q": q, "k": k, "v": v, "tokens": listed, **bounds,
            "pages": or_placeholder(block_table, lse),
            "tops": tops, "totals": totals, "partial": partial, "kept": logits,
            **softmax_factors(call.logits, dim), **strides, **sizes, "splits": splits,
            "tokens_batch": tokens_batch,
            "tokens_head": tokens_head,
            "pages_width": pages_width,
        },
        constants={
            "D": dim, "BLOCK_D": block_d, "E": v_dim, "BLOCK_E": block_e, "ROWS": build.rows,
            "KEYS": build.keys,
            "STAGES": build.stages, "PAGE": page, "SOFTCAP": softcap is not None,
            "PRECISION": build.precision,
            **which, "KEEP": mass is not None,
        },
        options={"num_warps": build.warps, "num_stages": build.stages, "enable_fp_fusion": True},
        plain=not (any(which.values()) or paged or softcap or mass is not None),
    )  # fmt: skip
    launches = [
        split,
        combine(split.arguments, out, lse, call.logits.wide_sinks, rows=rows, splits=splits),
    ]
    if mass is not None:
        common = {name: split.arguments[name] for name in ("kept", *bounds, *sizes)}
        score = KernelCall(
            module=_MODULE,
            kernel="score_kernel",
            grid=(batch * num_kv_heads, -(-places // _SCORED)),
            arguments={**common, "lse": lse, "scores": mass},
            constants={"KEYS": _SCORED, "LARGEST": scores == "max", **which},
            options={"num_warps": 4},
            plain=False,
        )
        launches.append(score)
    return launches, Decoded(out, lse, mass)


def _with_sums(call: DecodeCall) -> Decoded:
    """Results of a prompt, with summed scores: attention, then the sums."""
    q, k, v = map(with_rows, (call.q, call.k, call.v))
    index = dense_index(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    out, lse = attention.run(AttentionCall(q, k, v, index, logits=call.logits))
    sums, scores = prepare_sums(q, k, lse, logits=call.logits)
    run_calls([sums], q.device, *_sums_build(q))
    return Decoded(out, lse, scores)


def prepare_sums(q: Tensor, k: Tensor, lse: Tensor, *, logits: Logits) -> tuple[KernelCall, Tensor]:
    """The launch that adds up probabilities by log-sum-exp (B, H, Q), and its sums (B, G, K)."""
    (batch, num_heads, q_len, dim) = q.shape
    (_, num_kv_heads, k_len, _) = k.shape
    target = architecture(q.device)
    # A product of fp32 without the matrix units holds whole operands in registers.
    widest = 256
    if q.element_size() == 4:
        widest = 128
    d0, d1 = split(dim, widest)
    build = select_sums_build(target, dim=d0 + d1, itemsize=q.element_size())
    scores = torch.empty(batch, num_kv_heads, k_len, dtype=torch.float32, device=q.device)
    strides = {
        f"{name}_{axis}": tensor.stride(i)
        for name, tensor in (("q", q), ("k", k))
        for i, axis in enumerate(("batch", "head", "row"))
    }
    call = KernelCall(
        module=_MODULE,
        kernel="column_sums_kernel",
        grid=(batch * num_kv_heads * -(-k_len // build.keys),),
        arguments={
            "q": q, "k": k, "lse": lse, "scores": scores, **softmax_factors(logits, q.shape[-1]),
            **strides,
            "num_kv_heads": num_kv_heads, "group": num_heads // num_kv_heads, "q_len": q_len,
            "k_len": k_len,
        },
        constants={
            "D": dim, "D0": d0, "D1": d1, "KEYS": build.keys, "QUERIES": build.queries,
            "STAGES": build.stages,
            "SOFTCAP": logits.softcap is not None, "PRECISION": build.precision,
        },
        options={"num_warps": build.warps, "num_stages": build.stages, "enable_fp_fusion": True},
        plain=logits.softcap is None,
    )  # fmt: skip
    return call, scores


def select_sums_build(target: str, *, dim: int, itemsize: int) -> SumsBuild:
    """The build of column_sums_kernel for an architecture and the padded head dim.

    Untimed: keys stay in shared memory and queries come by, as many bytes of both as let two
    programs run side by side where there is room for that, so that one multiplies while the other
    makes probabilities.
    """
    if target == "interpreter":
        return SumsBuild(keys=32, queries=32, warps=4, stages=1)
    if itemsize == 4:
        stages = 2
        if target == "hip":
            stages = 1
        precision = precision_of_float32(target, dim)
        if dim <= 64:
            return SumsBuild(keys=64, queries=32, warps=4, stages=stages, precision=precision)
        if dim <= 128:
            return SumsBuild(keys=32, queries=16, warps=4, stages=stages, precision=precision)
        return SumsBuild(keys=16, queries=16, warps=4, stages=stages, precision=precision)
    if target == "hip":
        if dim <= 128:
            return SumsBuild(keys=64, queries=64, warps=4, stages=1)
        if dim <= 256:
            return SumsBuild(keys=64, queries=32, warps=4, stages=1)
        return SumsBuild(keys=32, queries=16, warps=4, stages=1)
    if dim <= 128:
        return SumsBuild(keys=128, queries=64, warps=8, stages=3)
    if dim <= 256:
        return SumsBuild(keys=64, queries=32, warps=4, stages=3)
    return SumsBuild(keys=64, queries=16, warps=4, stages=2)


def _sums_build(q: Tensor) -> tuple[object, ...]:
    """Key under which a failed build of column_sums_kernel is remembered."""
    return "scores", str(q.device), q.dtype, q.shape[-1]


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()
