"""Speed of the kernels against torch's, side by side in one run, of right results only.

attention (the default): prefill by SDPA, by Headwise over every key, and by Headwise with patterns;
with --past N of new tokens behind N others. decode: one token by torch, and by Headwise over all
and over chosen keys.

    headwise bench --length 4096 8192 --head-dims 64 128 --json out.json
    headwise bench --past 32768 --length 64 200 1000
    headwise bench decode --length 8192 32768 --chosen 2048
    headwise bench --costs cost.safetensors --attach cfg.yaml

--costs measures a table of what attention costs by pattern, density, length and head dim; an
artifact can carry those of several devices.

Shapes: B batch (1 here), H query heads, G KV heads, S length, D head dim, N key tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, update
from artifacts import load as load_artifact
from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import (
    add_arguments,
    arg,
    at_least,
    check_ranges,
    config_of,
    option,
    shared,
)
from artifacts.files import check_writable
from profiling.environment import environment
from profiling.models.loading import check_device, settled
from profiling.speed.attention_speed import Size, Speed, measure, paper_patterns, patterns_for
from profiling.speed.baselines import COLUMNS
from profiling.speed.baselines import cells as speedup_cells
from profiling.speed.cost_grid import DEFAULT_LENGTHS, Grid, backend_of
from profiling.speed.cost_grid import run as measure_costs
from profiling.speed.cost_table import attach, load
from profiling.speed.decode_speed import DECODE_HEADER, DecodeSpeed, decode_cells, measure_decode

# Tokens of a prompt, and of new ones behind a past.
_LENGTHS = (4096, 8192, 16_384, 32_768)
_CHUNKS = (16, 64, 200, 1000)


def head_pair(text: str) -> tuple[int, int]:
    """Read H/G, such as 32/8."""
    heads, slash, kv_heads = text.partition("/")
    if not (
        slash
        and heads.isdigit()
        and kv_heads.isdigit()
        and int(kv_heads)
        and int(heads) % int(kv_heads) == 0
    ):
        raise argparse.ArgumentTypeError(
            f"must be H/G with H a multiple of G, such as 32/8, got {text!r}"
        )
    return int(heads), int(kv_heads)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to measure; heads are pairs of query and KV heads. Empty ones have defaults by what is
    measured."""

    what: str = arg(nargs="?", choices=("attention", "decode"), default="attention")
    length: tuple[int, ...] = shared(
        arguments.add_length,
        "tokens (default 4096 8192 16384 32768; with --past 16 64 200 1000; "
        "with --costs by device)",
        several=True,
        default=(),
    )
    past: int = option(
        "tokens before those of --length, whose keys are there", default=0, within=at_least(0)
    )
    head_dims: tuple[int, ...] = arg(
        "--head-dims", type=int, nargs="+", default=(64, 128), help="(default 64 128)"
    )
    heads: tuple[tuple[int, int], ...] = arg(
        "--heads",
        type=head_pair,
        nargs="+",
        metavar="H/G",
        default=(),
        help="query and KV heads (default 9/3; with --costs 8/2, too)",
    )
    density: tuple[float, ...] = arg(
        "--density",
        type=float,
        nargs="+",
        default=(),
        help="what the patterns are sized for (default 0.12; with --costs 0.03 0.06 0.12 0.25 0.5)",
    )
    paper_sizes: bool = option(
        "the sizes that MInference 1.0 names", default=False, action="store_true", advanced=True
    )
    chosen: int = option(
        "decode: how many keys are chosen", default=2048, within=at_least(1), advanced=True
    )
    costs: Path | None = option(
        "write what attention costs as a table, a .safetensors file; a killed run goes on",
        default=None,
        metavar="FILE",
    )
    table: Path | None = option(
        "with --attach: a table that was measured before; measures nothing",
        default=None,
        metavar="FILE",
        advanced=True,
    )
    attach: Path | None = option(
        "put the table into this artifact, beside those it has",
        default=None,
        metavar="ARTIFACT",
        advanced=True,
    )
    fresh: bool = shared(arguments.add_fresh, default=False)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="cpu")
    repeats: int = option("timed rounds, interleaved", default=5, within=at_least(1), advanced=True)
    seed: int = shared(arguments.add_seed, default=0)

    def __post_init__(self) -> None:
        check_ranges(self)
        for density in self.density:
            if not 0 < density <= 1:
                raise HeadwiseError(f"--density must be above 0 and at most 1, got {density}")
        if self.density and self.paper_sizes:
            raise HeadwiseError("--paper-sizes are sizes of their own: leave --density away")
        if self.attach is None and self.table is not None:
            raise HeadwiseError(
                "--table measures nothing: name the artifact that it goes into with --attach"
            )
        if self.attach is not None and (self.costs is None) == (self.table is None):
            raise HeadwiseError(
                "--attach puts a table into an artifact: give one of --costs and --table"
            )
        if self.past and (self.what == "decode" or self.costs is not None):
            raise HeadwiseError("--past is of attention alone: decode and --costs have none")
        # Before anything is measured: the last size may be the one that cannot be.
        _ = self.sizes

    @property
    def sizes(self) -> list[Size]:
        """Every size that is measured, short ones first."""
        return [
            Size(
                length=length,
                past=self.past,
                head_dim=head_dim,
                heads=heads,
                kv_heads=kv_heads,
                dtype=self.dtype,
                device=self.device,
                seed=self.seed,
            )
            for length in self.length or (_CHUNKS if self.past else _LENGTHS)
            for head_dim in self.head_dims
            for heads, kv_heads in self.heads or ((9, 3),)
        ]

    def grid(self) -> Grid:
        """The table's sizes."""
        lengths = DEFAULT_LENGTHS["cuda" if self.device.startswith("cuda") else "cpu"]
        return Grid(
            device=self.device,
            lengths=self.length or lengths,
            head_dims=self.head_dims,
            heads=self.heads or ((9, 3), (8, 2)),
            dtypes=(self.dtype,),
            densities=self.density or (0.03, 0.06, 0.12, 0.25, 0.5),
            repeats=self.repeats,
            seed=self.seed,
        )


HEADER = [
    *(
        "length",
        "dim",
        "heads",
        "pattern",
        "density",
        "sdpa ms",
        "dense ms",
        "sparse ms",
        "build ms",
    ),
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
    config = settled(config)
    lines = []
    for size in config.sizes:
        patterns = paper_patterns()
        if not config.paper_sizes:
            seen = size.past + size.length
            patterns = [
                pattern
                for density in config.density or (0.12,)
                for pattern in patterns_for(seen, density)
            ]
        for speed in measure(size, patterns, repeats=config.repeats):
            show(size, speed)
            lines.append((size, speed))
    return lines


def run_decode(
    config: Bench, show: Callable[[Size, DecodeSpeed], None]
) -> list[tuple[Size, DecodeSpeed]]:
    """Measure one token's attention at every size; its line is shown when it is there."""
    lines = []
    for size in config.sizes:
        speed = measure_decode(size, chosen=config.chosen, repeats=config.repeats)
        show(size, speed)
        lines.append((size, speed))
    return lines


def costs(config: Bench, command: str) -> None:
    """Measure the cost table or read one, and put it into an artifact where one is named.

    Raises:
        HeadwiseError: a file is missing or cannot be written, before anything is measured; a wrong
        result.
    """
    if config.costs is not None:
        check_writable(config.costs)
    if config.attach is not None:
        load_artifact(config.attach)
        check_writable(config.attach)
    if config.costs is not None:
        table = measure_costs(config.grid(), config.costs, command=command, fresh=config.fresh)
        print(
            f"{table.device}, backend {table.backend}: {len(table.costs)} measurements -> "
            f"{config.costs}"
        )
    else:
        assert config.table is not None
        table = load(config.table)
    if config.attach is not None:
        saved = update(config.attach, lambda artifact, arrays: attach(artifact, arrays, table))
        print(
            f"{config.attach}: carries the costs of "
            f"{', '.join(entry.device for entry in saved.costs)}"
        )


def parser() -> ArgumentParser:
    """The command line of headwise bench."""
    p = ArgumentParser(prog="headwise bench", description=__doc__)
    add_arguments(p, Bench)
    arguments.add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    to_json = options.json
    config = config_of(Bench, vars(options))
    check_device(config.device)
    command = arguments.as_typed("bench", argv)
    if config.costs is not None or config.table is not None:
        costs(config, command)
        return 0
    where = environment(config.device)
    if to_json != arguments.STDOUT:
        print(", ".join(f"{name} {value}" for name, value in where.items()))
    header = HEADER if config.what == "attention" else DECODE_HEADER
    widths = [max(len(name), 7) for name in header]
    if config.what == "attention":
        widths[header.index("pattern")] = 14

    def show(line: list[str]) -> None:
        if to_json != arguments.STDOUT:
            print(
                "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)),
                flush=True,
            )

    show(header)
    lines: list[tuple[Size, Any]] = []
    if config.what == "attention":
        lines += run(config, lambda size, speed: show(cells(size, speed)))
    else:
        lines += run_decode(config, lambda size, speed: show(decode_cells(size, speed)))
    record = {
        "command": command,
        "settings": asdict(config),
        "environment": {**where, "backend": backend_of(config.sizes[0])},
        "lines": [asdict(size) | asdict(speed) for size, speed in lines],
    }
    arguments.deliver_json(record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
