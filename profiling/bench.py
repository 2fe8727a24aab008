"""Speed of sparse attention against dense: SDPA, compiled FlexAttention with the equal mask, and Headwise, in turn.

    python -m profiling.bench attention --lengths 4096 8192 --head-dims 64 128 --json out.json

Shapes: B batch (1 here), H query heads, G KV heads, S length, D head dim, N key tiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels.dispatch as dispatch
from artifacts import HeadwiseError
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import atomic_write, check_writable
from kernels.attention import reference, sparse_attention
from kernels.index import SparseIndex
from kernels.patterns import LayerPlan, Pattern, make
from profiling.flex import flex_attention
from profiling.latency import interleaved

# Largest error that still counts as right, in rounding steps of the dtype at the largest output.
_ROUNDING_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to measure; densities are those that the patterns are sized for."""

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[int, int]
    density: float
    dtype: str
    device: str
    repeats: int
    flex: bool
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One pattern at one size; seconds are medians, flops count computed tiles (dense: the causal half)."""

    length: int
    head_dim: int
    pattern: str
    density: float
    dense_seconds: float
    sparse_seconds: float
    build_seconds: float
    flex_seconds: float | None
    dense_flops: float
    sparse_flops: float

    @property
    def cells(self) -> list[str]:
        """The line as the table shows it."""
        both = self.sparse_seconds + self.build_seconds
        rate = (self.sparse_flops / self.sparse_seconds) / (self.dense_flops / self.dense_seconds)
        return [
            str(self.length),
            str(self.head_dim),
            self.pattern,
            f"{self.density:.3f}",
            f"{1e3 * self.dense_seconds:.1f}",
            f"{1e3 * self.sparse_seconds:.1f}",
            f"{1e3 * self.build_seconds:.1f}",
            "-" if self.flex_seconds is None else f"{1e3 * self.flex_seconds:.1f}",
            f"{self.dense_seconds / self.sparse_seconds:.2f}x",
            f"{self.dense_seconds / both:.2f}x",
            "-" if self.flex_seconds is None else f"{self.flex_seconds / self.sparse_seconds:.2f}x",
            f"{rate:.2f}",
        ]


HEADER = [
    *("length", "dim", "pattern", "density", "dense ms", "sparse ms", "build ms", "flex ms"),
    *("x dense", "x with build", "x flex", "rate/dense"),
]


def patterns_for(length: int, density: float) -> list[Pattern]:
    """One pattern of each kind, of about that density at that length; vertical-slash leans on columns."""
    tokens = max(128, round(density * length / 2))
    return [
        make("a_shape", sink=tokens // 4, window=max(64, tokens - tokens // 4)),
        make("vertical_slash", vertical=max(64, tokens * 3 // 4), slash=max(64, tokens // 4)),
        make("block_sparse", blocks=max(2, tokens // 64)),
        make("dense"),
    ]


def run(config: Bench, show: Callable[[Line], None]) -> list[Line]:
    """Measure every length, head dim and pattern; each line is shown when it is there."""
    lines = []
    for length in config.lengths:
        for head_dim in config.head_dims:
            for pattern in patterns_for(length, config.density):
                line = _measure(config, length, head_dim, pattern)
                show(line)
                lines.append(line)
    return lines


def _measure(config: Bench, length: int, head_dim: int, pattern: Pattern) -> Line:
    num_heads, num_kv_heads = config.heads
    generator = torch.Generator(config.device).manual_seed(config.seed)
    q, k, v = (
        torch.randn(
            1, heads, length, head_dim, generator=generator, device=config.device, dtype=getattr(torch, config.dtype)
        )
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    plan = LayerPlan([pattern] * num_heads, num_kv_heads)
    index = plan.build(q, k)
    runs: dict[str, Callable[[], object]] = {
        "dense": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "sparse": lambda: sparse_attention(q, k, v, index),
        "build": lambda: plan.build(q, k),
    }
    _check(sparse_attention(q, k, v, index), q, k, v, index, "headwise")
    if config.flex:
        flex = flex_attention(q, k, v, index)
        _check(flex(), q, k, v, index, "flex")
        runs["flex"] = flex
    seconds = {name: statistics.median(times) for name, times in _in_turn(runs, config).items()}
    return Line(
        length=length,
        head_dim=head_dim,
        pattern=pattern.kind,
        density=index.density().mean().item(),
        dense_seconds=seconds["dense"],
        sparse_seconds=seconds["sparse"],
        build_seconds=seconds["build"],
        flex_seconds=seconds.get("flex"),
        dense_flops=2.0 * length * length * num_heads * head_dim,
        sparse_flops=float(index.flops(head_dim).sum()),
    )


def _in_turn(runs: dict[str, Callable[[], object]], config: Bench) -> dict[str, list[float]]:
    current: list[Callable[[], object]] = []

    def entering(run: Callable[[], object]) -> Callable[[], nullcontext[None]]:
        def enter() -> nullcontext[None]:
            current[:] = [run]
            return nullcontext()

        return enter

    contexts = {name: entering(run) for name, run in runs.items()}
    return interleaved(contexts, lambda: current[0](), repeats=config.repeats, device=config.device)


def _check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, index: SparseIndex, name: str) -> None:
    """Compare one head with the fp32 reference; a speed whose result is wrong is never printed."""
    first = SparseIndex(
        q_len=index.q_len,
        k_len=index.k_len,
        diagonals=index.diagonals[:, :1],
        tiles=index.tiles[:, :1],
        columns=index.columns[:, :1],
    )
    q, k, v = q[:, :1].float(), k[:, :1].float(), v[:, :1].float()
    expected, _ = reference.sparse_attention(q, k, v, first, scale=q.shape[-1] ** -0.5, softcap=None)
    error = float((out[:, :1].float() - expected).abs().max())
    allowed = _ROUNDING_STEPS * torch.finfo(out.dtype).eps * max(1.0, float(expected.abs().max()))
    if not error <= allowed:
        raise HeadwiseError(f"{name} is wrong: largest error {error:.3g}, allowed {allowed:.3g}; no speed is shown")


def environment(device: str) -> dict[str, str]:
    """What the figures depend on beside the command."""
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "threads": str(torch.get_num_threads()),
        "torch": version("torch"),
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def parser() -> argparse.ArgumentParser:
    """The command line of python -m profiling.bench."""
    p = ArgumentParser(prog="python -m profiling.bench", description=__doc__)
    p.add_argument("what", choices=("attention",))
    p.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    p.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    p.add_argument("--heads", type=int, nargs=2, metavar=("H", "G"), default=[9, 3], help="query and KV heads")
    p.add_argument("--density", type=float, default=0.12, help="what the patterns are sized for (default 0.12)")
    p.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    p.add_argument("--device", default="cpu")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--no-flex", dest="flex", action="store_false", help="leave compiled FlexAttention out")
    p.add_argument("--json", type=Path, help="write the figures and what they were measured with")
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options: dict[str, Any] = vars(parser().parse_args(argv))
    to_json, _ = options.pop("json"), options.pop("what")
    if to_json:
        check_writable(to_json)
    for name in ("lengths", "head_dims", "heads"):
        options[name] = tuple(options[name])
    config = Bench(**options)
    where = environment(config.device)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    widths = [max(len(name), 7) for name in HEADER]
    widths[HEADER.index("pattern")] = 14

    def show(cells: list[str]) -> None:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)

    show(HEADER)
    lines = run(config, lambda line: show(line.cells))
    record = {
        "command": "python -m profiling.bench " + " ".join(sys.argv[1:] if argv is None else argv),
        "settings": asdict(config),
        "environment": {**where, "backend": _backend(config)},
        "lines": [asdict(line) for line in lines],
    }
    if to_json:
        atomic_write(to_json, (json.dumps(record, indent=1) + "\n").encode())
    return 0


def _backend(config: Bench) -> str:
    probe = torch.empty(1, 1, 1, config.head_dims[0], dtype=getattr(torch, config.dtype), device=config.device)
    return dispatch.choose("auto", probe, probe, probe).__name__.rpartition(".")[2]


if __name__ == "__main__":
    run_command(main)
