"""Speed of the kernels against torch's, side by side in one run, of right results only.

attention: prefill by SDPA, by Headwise over every key, and by Headwise with patterns.
decode: one token by torch, and by Headwise over all and over chosen keys.

    python -m profiling.bench attention --length 4096 8192 --head-dims 64 128 --json out.json
    python -m profiling.bench decode --length 8192 32768 --chosen 2048

Shapes: B batch (1 here), H query heads, G KV heads, S length, D head dim, N key tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import kernels.dispatch as dispatch
from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.environment import environment
from profiling.models.loading import check_device
from profiling.speed.attention_speed import Size, Speed, measure, paper_patterns, patterns_for
from profiling.speed.baselines import COLUMNS
from profiling.speed.baselines import cells as speedup_cells
from profiling.speed.decode_speed import DECODE_HEADER, DecodeSpeed, decode_cells, measure_decode


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to measure; heads are pairs of query and KV heads.

    The patterns are sized for the density, or have the sizes of MInference 1.0 where it is None.
    """

    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    density: float | None
    dtype: str
    device: str
    repeats: int
    chosen: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.density is not None and not 0 < self.density <= 1:
            raise HeadwiseError(f"--density must be above 0 and at most 1, got {self.density}")
        for name in ("repeats", "chosen"):
            if (value := getattr(self, name)) < 1:
                raise HeadwiseError(f"--{name} must be at least 1, got {value}")
        # Before anything is measured: the last size may be the one that cannot be.
        _ = self.sizes

    @property
    def sizes(self) -> list[Size]:
        """Every size that is measured, short ones first."""
        return [
            Size(
                length=length,
                head_dim=head_dim,
                heads=heads,
                kv_heads=kv_heads,
                dtype=self.dtype,
                device=self.device,
                seed=self.seed,
            )
            for length in self.lengths
            for head_dim in self.head_dims
            for heads, kv_heads in self.heads
        ]


HEADER = [
    *("length", "dim", "heads", "pattern", "density", "sdpa ms", "dense ms", "sparse ms", "build ms"),
    *(*COLUMNS, "without build", "rate/sdpa"),
]


def cells(size: Size, speed: Speed) -> list[str]:
    """A line of the table: speed-ups with the index build, and the first of them without.

    rate/sdpa compares operations on computed tiles a second with SDPA's on the causal half.
    """
    rate = (speed.flops / speed.sparse_seconds) / (size.dense_flops / speed.sdpa_seconds)
    return [
        str(size.length),
        str(size.head_dim),
        f"{size.heads}/{size.kv_heads}",
        speed.pattern,
        f"{speed.density:.3f}",
        f"{1e3 * speed.sdpa_seconds:.1f}",
        f"{1e3 * speed.kernel_seconds:.1f}",
        f"{1e3 * speed.sparse_seconds:.1f}",
        f"{1e3 * speed.build_seconds:.1f}",
        *speedup_cells(speed.over(speed.sparse_seconds + speed.build_seconds)),
        f"{speed.over(speed.sparse_seconds).value:.2f}x",
        f"{rate:.2f}",
    ]


def run(config: Bench, show: Callable[[Size, Speed], None]) -> list[tuple[Size, Speed]]:
    """Measure every size; its lines are shown when they are there."""
    lines = []
    for size in config.sizes:
        patterns = paper_patterns() if config.density is None else patterns_for(size.length, config.density)
        for speed in measure(size, patterns, repeats=config.repeats):
            show(size, speed)
            lines.append((size, speed))
    return lines


def run_decode(config: Bench, show: Callable[[Size, DecodeSpeed], None]) -> list[tuple[Size, DecodeSpeed]]:
    """Measure one token's attention at every size; its line is shown when it is there."""
    lines = []
    for size in config.sizes:
        speed = measure_decode(size, chosen=config.chosen, repeats=config.repeats)
        show(size, speed)
        lines.append((size, speed))
    return lines


def head_pair(text: str) -> tuple[int, int]:
    """Read H/G, such as 32/8."""
    heads, slash, kv_heads = text.partition("/")
    if not (slash and heads.isdigit() and kv_heads.isdigit() and int(kv_heads) and int(heads) % int(kv_heads) == 0):
        raise argparse.ArgumentTypeError(f"must be H/G with H a multiple of G, such as 32/8, got {text!r}")
    return int(heads), int(kv_heads)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.bench."""
    p = ArgumentParser(prog="python -m profiling.bench", description=__doc__)
    p.add_argument("what", choices=("attention", "decode"))
    lengths = (4096, 8192, 16384, 32768)
    arguments.add_length(p, "tokens (default %(default)s)", several=True, default=lengths, old="--lengths")
    p.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    p.add_argument(
        "--heads", type=head_pair, nargs="+", default=[(9, 3)], metavar="H/G", help="query and KV heads (default 9/3)"
    )
    sizes = p.add_mutually_exclusive_group()
    sizes.add_argument("--density", type=float, default=0.12, help="what the patterns are sized for (default 0.12)")
    sizes.add_argument(
        "--paper-sizes", dest="density", action="store_const", const=None, help="the sizes that MInference 1.0 names"
    )
    arguments.add_dtype(p)
    arguments.add_device(p)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--chosen", type=int, default=Bench.chosen, help="decode: how many keys are chosen (default 2048)")
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options: dict[str, Any] = vars(parser().parse_args(argv))
    to_json, what = options.pop("json"), options.pop("what")
    options["lengths"] = options.pop("length")
    for name in ("lengths", "head_dims", "heads"):
        options[name] = tuple(options[name])
    config = Bench(**options)
    check_device(config.device)
    where = environment(config.device)
    if to_json != arguments.STDOUT:
        print(", ".join(f"{name} {value}" for name, value in where.items()))
    header = HEADER if what == "attention" else DECODE_HEADER
    widths = [max(len(name), 7) for name in header]
    if what == "attention":
        widths[header.index("pattern")] = 14

    def show(line: list[str]) -> None:
        if to_json != arguments.STDOUT:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)

    show(header)
    lines: list[tuple[Size, Any]] = []
    if what == "attention":
        lines += run(config, lambda size, speed: show(cells(size, speed)))
    else:
        lines += run_decode(config, lambda size, speed: show(decode_cells(size, speed)))
    record = {
        "command": arguments.as_typed("profiling.bench", argv),
        "settings": asdict(config),
        "environment": {**where, "backend": backend_of(config.sizes[0])},
        "lines": [asdict(size) | asdict(speed) for size, speed in lines],
    }
    arguments.deliver_json(record, to_json)
    return 0


def backend_of(size: Size) -> str:
    """The kernel backend that serves tensors of that size."""
    probe = torch.empty(1, 1, 1, size.head_dim, dtype=getattr(torch, size.dtype), device=size.device)
    return dispatch.choose("auto", probe, probe, probe).__name__.rpartition(".")[2]


if __name__ == "__main__":
    run_command(main)
