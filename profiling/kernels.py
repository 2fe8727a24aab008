"""Measures what attention costs on a device: seconds by pattern, density, length, head dim and dtype, as a table.

    python -m profiling.kernels --device cpu --out cost.safetensors
    python -m profiling.kernels --device cpu --out cost.safetensors --attach cfg.yaml
    python -m profiling.kernels --table cost.safetensors --attach cfg.yaml

The search weighs candidates by this table where it is given one; an artifact can carry those of several devices. A
killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import artifacts
from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import check_writable
from kernels.patterns import KINDS
from profiling.bench import backend_of, head_pair
from profiling.environment import environment
from profiling.ledger import Ledger
from profiling.models.loading import check_device
from profiling.progress import phase
from profiling.speed.attention_speed import Size, Speed, measure, patterns_for
from profiling.speed.cost_table import Cost, CostTable, attach, load, save

# Below this length dense attention serves anyway.
DEFAULT_LENGTHS = {"cpu": (2048, 4096, 8192, 16_384), "cuda": (8192, 32_768, 131_072, 524_288)}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination is measured; heads are pairs of query and KV heads."""

    device: str
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    densities: tuple[float, ...]
    repeats: int
    seed: int = 0

    def sizes(self) -> Iterator[Size]:
        """Short ones first: an interrupted table is of use."""
        for length, head_dim, (heads, kv_heads), dtype in itertools.product(
            self.lengths, self.head_dims, self.heads, self.dtypes
        ):
            yield Size(
                length=length,
                head_dim=head_dim,
                heads=heads,
                kv_heads=kv_heads,
                dtype=dtype,
                device=self.device,
                seed=self.seed,
            )


def run(grid: Grid, out: Path, *, command: str, fresh: bool = False) -> CostTable:
    """Measure what an interrupted run has not measured yet, then write the table.

    Raises:
        HeadwiseError: a backend computed something wrong, or the interrupted run measured otherwise.
    """
    where = environment(grid.device)
    sizes = list(grid.sizes())
    # Sizes may be added; what a size is measured by may not change.
    settings = {name: getattr(grid, name) for name in ("densities", "repeats", "seed")} | where
    costs: list[Cost] = []
    with Ledger(out, "kernels", settings=settings, fresh=fresh) as ledger, phase("sizes", len(sizes), "sizes") as shown:
        for size in sizes:
            unit = ledger.unit("size", asdict(size))
            rows = ledger.get(unit)
            if rows is None:
                rows = ledger.put(unit, [asdict(Cost.of(size, speed)) for speed in _measure(grid, size)])
                shown.update()
            else:
                shown.skip()
            costs += [Cost(**row) for row in rows]
        device = where.pop("device")
        backend = backend_of(sizes[0])
        table = CostTable(device=device, backend=backend, versions=where, command=command, costs=tuple(costs))
        save(table, out)
        ledger.remove()
    return table


def _measure(grid: Grid, size: Size) -> list[Speed]:
    patterns = {pattern for density in grid.densities for pattern in patterns_for(size.length, density)}
    ordered = sorted(patterns, key=lambda p: (list(KINDS).index(p.kind), *(v for v in vars(p).values() if v)))
    return measure(size, ordered, repeats=grid.repeats)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.kernels."""
    p = ArgumentParser(prog="python -m profiling.kernels", description=__doc__)
    arguments.add_out(p, "the table, a .safetensors file", required=False)
    p.add_argument("--table", type=Path, help="with --attach: a table that was measured before; measures nothing")
    p.add_argument("--attach", type=Path, metavar="CFG", help="put the table into this artifact, beside those it has")
    arguments.add_device(p)
    arguments.add_length(p, "tokens (default: by device)", several=True, old="--lengths")
    p.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    p.add_argument("--heads", type=head_pair, nargs="+", default=[(9, 3), (8, 2)], metavar="H/G")
    arguments.add_dtype(p, several=True, old="--dtypes")
    p.add_argument("--densities", type=float, nargs="+", default=[0.03, 0.06, 0.12, 0.25, 0.5])
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--fresh", action="store_true", help="discard an interrupted run instead of going on with it")
    return p


def config_from(options: argparse.Namespace) -> Grid:
    """The grid of a command line.

    Raises:
        HeadwiseError: a device that is not there, a length or a density that cannot be.
    """
    check_device(options.device)
    lengths = tuple(options.length or DEFAULT_LENGTHS["cuda" if options.device.startswith("cuda") else "cpu"])
    if min(lengths) < 256:
        raise HeadwiseError(f"lengths must be at least 256 tokens, got {min(lengths)}")
    for density in options.densities:
        if not 0 < density <= 1:
            raise HeadwiseError(f"densities must be above 0 and at most 1, got {density}")
    if options.repeats < 1:
        raise HeadwiseError(f"repeats must be at least 1, got {options.repeats}")
    return Grid(
        device=options.device,
        lengths=lengths,
        head_dims=tuple(options.head_dims),
        heads=tuple(options.heads),
        dtypes=tuple(options.dtype),
        densities=tuple(options.densities),
        repeats=options.repeats,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    _check_files(options)
    if options.table is not None:
        table = load(options.table)
    else:
        command = arguments.as_typed("profiling.kernels", argv)
        table = run(config_from(options), options.out, command=command, fresh=options.fresh)
        print(f"{table.device}, backend {table.backend}: {len(table.costs)} measurements -> {options.out}")
    if options.attach is not None:
        saved = artifacts.update(options.attach, lambda artifact, arrays: attach(artifact, arrays, table))
        print(f"{options.attach}: carries the costs of {', '.join(entry.device for entry in saved.costs)}")
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Raise HeadwiseError before anything is measured where files are missing or cannot be written."""
    if (options.out is None) == (options.table is None):
        raise HeadwiseError("give --out, where to write what is measured, or --table, what was measured before")
    if options.table is not None and options.attach is None:
        raise HeadwiseError("--table measures nothing: name the artifact that it goes into with --attach")
    if options.out is not None:
        check_writable(options.out)
    if options.attach is not None:
        artifacts.load(options.attach)
        check_writable(options.attach)


if __name__ == "__main__":
    run_command(main)
