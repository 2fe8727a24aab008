"""Attention of a prefill beside torch's dense kernels, FlexAttention, FlashInfer and vLLM, at the published sizes.

Shapes: B batch (1 here), H query heads, G KV heads, S length, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from kernels.index import TILE, num_tiles
from kernels.patterns import LayerPlan, Pattern, make
from profiling.gpu import vllm_sparse
from profiling.gpu.steps import Rows, Setting
from profiling.speed.attention_speed import Size, Speed, check, inputs, measure, paper_patterns, patterns_for
from profiling.speed.latency import in_turn, medians

_LENGTHS = {"attention": (32_768, 8192, 131_072), "long": (262_144, 524_288, 2**20), "others": (8192, 32_768)}
_SMALL_LENGTHS = {"attention": 130, "long": 65, "others": 65}
# A dense call of a layer of 32 heads at 1M tokens takes an H100 15 s. Beyond this length each call is timed once, after
# the one whose result was compared.
_TIMED_OFTEN = 131_072
_FLASHINFER_ERROR = 2e-2


def pieces(step: str, setting: Setting) -> list[str]:
    """See profiling.gpu.steps."""
    lengths = (_SMALL_LENGTHS[step],) if setting.small else _LENGTHS[step]
    if step != "others":
        return [str(length) for length in lengths]
    flash = [f"flashinfer {length}" for length in lengths] if find_spec("flashinfer") else []
    if find_spec("vllm"):
        flash += [f"vllm {length}" for length in lengths]
    return [*flash * (not setting.small), *(f"flex {length}" for length in lengths)]


def run(piece: str, setting: Setting) -> dict[str, Any]:
    """Seconds of each pattern, of its index, and of what stands beside it; every result is compared first."""
    *what, length = piece.split()
    size = size_of(int(length), setting)
    if what == ["flashinfer"]:
        return {"size": asdict(size), "flashinfer": _flashinfer(size, setting)}
    if what == ["vllm"]:
        return {"size": asdict(size), "vllm": _vllm(size, setting)}
    repeats = 0 if setting.small or size.length > _TIMED_OFTEN else 3
    speeds = measure(size, patterns(size, setting), repeats=repeats, flex=what == ["flex"])
    return {"size": asdict(size), "speeds": [asdict(speed) for speed in speeds]}


def size_of(length: int, setting: Setting) -> Size:
    """The heads of an 8B model at that length."""
    heads, kv_heads, dim = (2, 1, 64) if setting.small else (32, 8, 128)
    return Size(length=length, head_dim=dim, heads=heads, kv_heads=kv_heads, dtype=setting.dtype, device=setting.device)


def patterns(size: Size, setting: Setting) -> list[Pattern]:
    """The published sizes; in a rehearsal such as leave something out."""
    return patterns_for(size.length, 0.3)[:3] if setting.small else paper_patterns()


def _flashinfer(size: Size, setting: Setting) -> list[dict[str, Any]]:
    """FlashInfer's block-sparse attention over the tiles of a block-sparse index, its plan made beforehand."""
    import flashinfer

    q, k, v = inputs(size)
    (pattern,) = [each for each in patterns(size, setting) if each.kind == "block_sparse"]
    index = LayerPlan([pattern] * size.heads, size.kv_heads).build(q, k)
    n = num_tiles(size.length)
    # One mask for each KV head: the tiles of its first query head.
    mask = torch.cat([tiles for _, tiles in index.row_masks()], 2)[0, :: size.heads // size.kv_heads]
    wrapper = flashinfer.sparse.VariableBlockSparseAttentionWrapper(
        torch.empty(2**28, dtype=torch.uint8, device=size.device)
    )
    sizes = torch.full((size.kv_heads, n), TILE, dtype=torch.int32, device=size.device)
    wrapper.plan(mask, sizes, sizes, size.heads, size.kv_heads, size.head_dim, q_data_type=q.dtype)
    q, k, v = (x[0].contiguous() for x in (q, k, v))
    # Its tiles are whole, without a causal limit: the last tile of queries of the first head says whether it is right.
    seen = mask[0, -1].repeat_interleave(TILE)[: size.length]
    logits = q[0, (n - 1) * TILE :].float() @ k[0].float().T * size.head_dim**-0.5
    expected = logits.masked_fill(~seen, float("-inf")).softmax(-1) @ v[0].float()
    error = float((wrapper.run(q, k, v)[0, (n - 1) * TILE :].float() - expected).abs().max())
    if not error <= _FLASHINFER_ERROR:
        raise RuntimeError(f"FlashInfer computes something else: largest error {error:.3g}; no speed is shown")
    taken = medians(in_turn({"": lambda: wrapper.run(q, k, v)}, repeats=3, device=size.device))[""]
    group = size.heads // size.kv_heads
    return [{"seconds": taken, "flops": float(mask.sum()) * group * 4 * TILE * TILE * size.head_dim}]


def _vllm(size: Size, setting: Setting) -> list[dict[str, Any]]:
    """vLLM's vertical-slash attention over the entries of a vertical-slash index."""
    q, k, v = inputs(size)
    (pattern,) = [each for each in patterns(size, setting) if each.kind == "vertical_slash"]
    index = LayerPlan([pattern] * size.heads, size.kv_heads).build(q, k)
    run = vllm_sparse.attention(q, k, v, index)
    check(run(), q, k, v, index, "vLLM's sparse_attn_func")
    taken = medians(in_turn({"": run}, repeats=3, device=size.device))[""]
    return [{"seconds": taken, "flops": float(index.flops(size.head_dim).sum())}]


def lines(rows: Rows) -> list[Sequence[str]]:
    """TF/s count computed tiles; the factors are against torch's fastest dense kernel, with the index and without."""
    head = ("tokens", "pattern", "density", "dense ms", "dense TF/s", "ours, every key TF/s", "sparse ms", "TF/s")
    table: list[Sequence[str]] = [(*head, "index ms", "index share", "x dense", "without index", "flex ms")]
    for row in rows.values():
        size = Size(**row["size"])
        for name, kind in (("flashinfer", "block_sparse, FlashInfer"), ("vllm", "vertical_slash, vLLM")):
            for each in row.get(name, ()):
                rate = _rate(each["flops"], each["seconds"])
                table.append((f"{size.length:,}", kind, "", "", "", "", _ms(each["seconds"]), rate, *[""] * 5))
        for speed in (Speed(**each) for each in row.get("speeds", ())):
            whole = speed.sparse_seconds + speed.build_seconds
            table.append(
                (
                    f"{size.length:,}", speed.pattern, f"{speed.density:.3f}",
                    _ms(speed.sdpa_seconds), _rate(size.dense_flops, speed.sdpa_seconds),
                    _rate(size.dense_flops, speed.kernel_seconds),
                    _ms(speed.sparse_seconds), _rate(speed.flops, speed.sparse_seconds),
                    _ms(speed.build_seconds), f"{speed.build_seconds / whole:.0%}",
                    f"{speed.sdpa_seconds / whole:.2f}x", f"{speed.sdpa_seconds / speed.sparse_seconds:.2f}x",
                    "-" if speed.flex_seconds is None else _ms(speed.flex_seconds),
                )
            )  # fmt: skip
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _rate(flops: float, seconds: float) -> str:
    return f"{flops / seconds / 1e12:.0f}"


def make_index(size: Size, kinds: Sequence[str], setting: Setting) -> tuple[Any, Any, Any, Any]:
    """Inputs of a size and the index of a layer of these kinds, in turn: what the sweep is timed on."""
    q, k, v = inputs(size)
    by_kind = {pattern.kind: pattern for pattern in (*patterns(size, setting), make("dense"))}
    chosen = [by_kind[kinds[head % len(kinds)]] for head in range(size.heads)]
    return q, k, v, LayerPlan(chosen, size.kv_heads).build(q, k)
