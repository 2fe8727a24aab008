"""Runs headwise bench: a table of attention or of decode, and the cost table of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from artifacts import load as load_artifact
from artifacts import update
from artifacts.files import check_writable
from profiling.environment import environment
from profiling.speed.attention_speed import Speed, measure, paper_patterns, patterns_for
from profiling.speed.baselines import COLUMNS
from profiling.speed.baselines import cells as speedup_cells
from profiling.speed.config import Bench, Size
from profiling.speed.cost_grid import backend_of
from profiling.speed.cost_grid import run as measure_costs
from profiling.speed.cost_table import attach, load
from profiling.speed.decode_speed import DECODE_HEADER, DecodeSpeed, decode_cells, measure_decode

HEADER = ["length", "dim", "heads", "pattern", "density"]
HEADER += ["sdpa ms", "dense ms", "sparse ms", "build ms", *COLUMNS, "without build", "rate/sdpa"]


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


def tables(config: Bench, command: str, *, show: bool) -> dict[str, Any]:
    """Measure every size and return the record; `show` prints a line as soon as it is measured."""
    where = environment(config.device)
    if config.what == "decode":
        header = DECODE_HEADER
    else:
        header = HEADER
    widths = [max(len(name), 7) for name in header]
    if config.what == "attention":
        widths[header.index("pattern")] = 14

    def print_line(cells: list[str]) -> None:
        if show:
            padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            print("  ".join(padded), flush=True)

    if show:
        print(", ".join(f"{name} {value}" for name, value in where.items()))
    print_line(header)
    lines: list[tuple[Size, Any]] = []
    if config.what == "attention":
        lines += run(config, lambda size, speed: print_line(cells(size, speed)))
    else:
        lines += run_decode(config, lambda size, speed: print_line(decode_cells(size, speed)))
    return {
        "command": command,
        "settings": asdict(config),
        "environment": {**where, "backend": backend_of(config.sizes[0])},
        "lines": [asdict(size) | asdict(speed) for size, speed in lines],
    }


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
