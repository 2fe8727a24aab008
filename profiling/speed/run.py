"""Runs headwise bench: a table of attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from artifacts import HeadwiseError
from kernels import registry
from kernels.call import Operands
from profiling.environment import environment
from profiling.speed.attention_speed import Speed, measure, paper_patterns, patterns_for
from profiling.speed.baselines import COLUMNS
from profiling.speed.baselines import cells as speedup_cells
from profiling.speed.config import Bench, Size

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


def run(config: Bench, *, show: bool) -> dict[str, Any]:
    """Measure every size and return the record; `show` prints a line as soon as it is measured."""
    where = environment(config.device) | {"backend": _backend(config.sizes[0])}
    widths = [max(len(name), 7) for name in HEADER]
    widths[HEADER.index("pattern")] = 14

    def print_line(cells: list[str]) -> None:
        if show:
            padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            print("  ".join(padded), flush=True)

    if show:
        print(", ".join(f"{name} {value}" for name, value in where.items()))
    print_line(HEADER)
    lines: list[tuple[Size, Speed]] = []
    for size in config.sizes:
        patterns = paper_patterns()
        if not config.paper_sizes:
            patterns = [
                pattern
                for density in config.density or (0.12,)
                for pattern in patterns_for(size.length, density)
            ]
        for speed in measure(size, patterns, repeats=config.repeats):
            print_line(cells(size, speed))
            lines.append((size, speed))
    return {
        "command": config.command,
        "settings": config.settings(),
        "environment": where,
        "lines": [asdict(size) | asdict(speed) for size, speed in lines],
    }


def _backend(size: Size) -> str:
    """Return the kernel backend that serves tensors of that size.

    Raises:
        HeadwiseError: none does.
    """
    probe = torch.empty(
        1, 1, 1, size.head_dim, dtype=getattr(torch, size.dtype), device=size.device
    )
    name, reason = registry.fast("attention", Operands(probe, probe, probe))
    if reason is not None:
        raise HeadwiseError(f"nothing to time on {size.device} in {size.dtype}: {reason}")
    return name
