"""The CPU's attention engines against each other and against torch's sdpa, in bf16, by GFLOP/s.

    python benchmarks/cpu_engines.py --out cpu_engines.json

Dense causal attention by head dim and length, interleaved, medians; and nanoseconds for 16 scores
of the inner loop on one thread, 64 queries of each of 64 heads over 4,096 keys that they share. An
engine whose result differs from fp32 is listed as wrong, without a speed, and the exit status is 3.

Shapes: H query heads, G KV heads, Q query length, K key length, D head dim; the batch is 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from result import Result, commit, labeled, machine_of, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from artifacts.cli.command import FOUND, run_command
from kernels.attention import AttentionCall, cpu, sparse_attention
from kernels.patterns.dense import dense_index
from profiling.environment import environment, versions
from profiling.speed.latency import medians, time_calls

# Query and KV heads by head dim: SmolLM2, and two common shapes.
_HEADS = {64: (9, 3), 128: (8, 2), 256: (4, 1)}
_SDPA = "sdpa"
# Of the last queries of a call, against fp32: one rounding of the output, and of the weights.
_CHECKED = 64
_ERROR = 2e-2
# Queries, heads, keys and head dim of the inner loop.
_INNER = (64, 64, 4096, 64)


def parser() -> argparse.ArgumentParser:
    """The script's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    p.add_argument("--head-dims", type=int, nargs="+", default=list(_HEADS), choices=list(_HEADS))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--out", type=Path, metavar="FILE", help="the result, as JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and one line of JSON; 3 where an engine is wrong."""
    options = parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    record: dict[str, Any] = {
        "environment": environment("cpu"),
        "why_no_tiles": cpu.why_no_tiles(),
        "dense": [],
    }
    for head_dim in options.head_dims:
        for length in options.lengths:
            record["dense"].append(_dense(head_dim, length, options.repeats))
    torch.set_num_threads(1)
    record["inner_loop"] = _inner_loop(options.repeats)
    print(_table(record))
    result = _result(options, record)
    if options.out is None:
        print(json.dumps(result.model_dump(mode="json")))
    else:
        write(options.out, result)
    rows = [*record["dense"], record["inner_loop"]]
    return FOUND if any(row["wrong"] for row in rows) else 0


def _result(options: argparse.Namespace, record: dict[str, Any]) -> Result:
    settings = {"why_no_tiles": record["why_no_tiles"], "threads": options.threads}
    return Result(
        what="The CPU's attention engines and sdpa, dense causal attention, GFLOP/s",
        command=f"python benchmarks/cpu_engines.py --repeats {options.repeats}",
        commit=commit(),
        machine=machine_of(record["environment"]),
        versions=versions(),
        rows=labeled("settings", [settings])
        + labeled("dense", record["dense"])
        + labeled("inner_loop", [record["inner_loop"]]),
    )


def _dense(head_dim: int, length: int, repeats: int) -> dict[str, Any]:
    """GFLOP/s of dense causal attention, of the engines and of sdpa."""
    heads, kv_heads = _HEADS[head_dim]
    inputs = _inputs(heads, kv_heads, length, length, head_dim)
    seconds, wrong = _measured(inputs, repeats)
    flops = 2 * 2 * heads * head_dim * length * length / 2
    rates = {name: flops / each / 1e9 for name, each in seconds.items()}
    return {"head_dim": head_dim, "length": length, "gflops": rates, "wrong": wrong}


def _inner_loop(repeats: int) -> dict[str, Any]:
    """Nanoseconds for 16 scores, of the engines, on one thread."""
    q_len, heads, k_len, head_dim = _INNER
    seconds, wrong = _measured(_inputs(heads, 1, q_len, k_len, head_dim), repeats, with_sdpa=False)
    scores = heads * q_len * (k_len - q_len / 2)
    return {
        "ns": {name: each * 1e9 / (scores / 16) for name, each in seconds.items()},
        "wrong": wrong,
    }


def _inputs(
    heads: int, kv_heads: int, q_len: int, k_len: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (1, H, Q, D), k and v (1, G, K, D) in bf16."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (1, heads, q_len, head_dim),
        (1, kv_heads, k_len, head_dim),
        (1, kv_heads, k_len, head_dim),
    )
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(
            torch.bfloat16
        )
        for shape in shapes
    )
    return q, k, v


def _measured(
    inputs: tuple[Tensor, Tensor, Tensor], repeats: int, with_sdpa: bool = True
) -> tuple[dict[str, float], list[str]]:
    """Median seconds of all that are right, and the names of those that are wrong."""
    q, k, v = inputs
    index = dense_index(1, q.shape[1], q.shape[2], k.shape[2], q.device)

    def engine(name: str) -> Callable[[], Tensor]:
        return lambda: cpu.run(AttentionCall(q, k, v, index), engine=name)[0]

    runs = {name: engine(name) for name in cpu.engines(torch.bfloat16) if name != "float"}
    if with_sdpa:
        runs[_SDPA] = lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    last = min(_CHECKED, q.shape[2])
    # The last queries alone: each sees the same keys as in the whole call.
    oracle = sparse_attention(
        *(q[:, :, -last:].float(), k.float(), v.float()),
        dense_index(1, q.shape[1], last, k.shape[2], q.device),
        backend="reference",
    )
    wrong = [name for name, run in runs.items() if not _right(run()[:, :, -last:], oracle)]
    right = {name: run for name, run in runs.items() if name not in wrong}
    return medians(time_calls(right, repeats=repeats, device="cpu")), wrong


def _right(out: Tensor, oracle: Tensor) -> bool:
    return bool(torch.allclose(out.float(), oracle, rtol=0, atol=_ERROR))


def _table(record: dict[str, Any]) -> str:
    """Rates by head dim and length; a wrong result in place of a speed."""
    names = [*(e for e in cpu.engines(torch.bfloat16) if e != "float"), _SDPA]
    lines = [
        f"{record['environment']['device']}, {record['environment']['threads']} threads, GFLOP/s"
    ]
    if record["why_no_tiles"]:
        lines.append(f"no engine by AMX: {record['why_no_tiles']}")
    lines.append(f"{'head dim':>8}{'tokens':>8}" + "".join(f"{name:>10}" for name in names))
    for row in record["dense"]:
        cells = (
            f"{row['gflops'][name]:>10,.0f}" if name in row["gflops"] else f"{'wrong':>10}"
            for name in names
        )
        lines.append(f"{row['head_dim']:>8}{row['length']:>8,}" + "".join(cells))
    inner = record["inner_loop"]
    times = (f"{name} {time:.2f}" for name, time in inner["ns"].items())
    lines.append(f"ns for 16 scores on one thread, head dim 64: {', '.join(times)}")
    lines += [f"wrong in the inner loop: {name}" for name in inner["wrong"]]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
