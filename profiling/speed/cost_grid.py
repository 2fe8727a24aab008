"""Measures a device's cost table: seconds by pattern, density, length, head dim and dtype."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from kernels import registry
from kernels.call import Operands
from kernels.patterns import KINDS
from profiling.environment import environment
from profiling.ledger import Ledger
from profiling.progress import phase
from profiling.speed.attention_speed import Speed, measure, patterns_for
from profiling.speed.config import Grid, Size
from profiling.speed.cost_table import Cost, CostTable, save


def run(grid: Grid, out: Path, *, command: str, fresh: bool = False) -> CostTable:
    """Measure what an interrupted run has not measured yet, then write the table.

    Raises:
        HeadwiseError: a backend computed something wrong, or the interrupted run measured
            otherwise.
    """
    where = environment(grid.device)
    sizes = list(grid.sizes())
    # Sizes may be added; what a size is measured by may not change.
    settings = {name: getattr(grid, name) for name in ("densities", "repeats", "seed")} | where
    costs: list[Cost] = []
    with (
        Ledger(out, "kernels", settings=settings, fresh=fresh) as ledger,
        phase("sizes", len(sizes), "sizes") as shown,
    ):
        for size in sizes:
            unit = ledger.unit("size", asdict(size))
            rows = ledger.get(unit)
            if rows is None:
                rows = ledger.put(
                    unit, [asdict(Cost.of(size, speed)) for speed in _measure(grid, size)]
                )
                shown.update()
            else:
                shown.skip()
            costs += [Cost(**row) for row in rows]
        device = where.pop("device")
        backend = backend_of(sizes[0])
        table = CostTable(
            device=device, backend=backend, versions=where, command=command, costs=tuple(costs)
        )
        save(table, out)
        ledger.remove()
    return table


def _measure(grid: Grid, size: Size) -> list[Speed]:
    patterns = {
        pattern for density in grid.densities for pattern in patterns_for(size.length, density)
    }
    ordered = sorted(
        patterns, key=lambda p: (list(KINDS).index(p.kind), *(v for v in vars(p).values() if v))
    )
    return measure(size, ordered, repeats=grid.repeats)


def backend_of(size: Size) -> str:
    """The kernel backend that serves tensors of that size."""
    probe = torch.empty(
        1, 1, 1, size.head_dim, dtype=getattr(torch, size.dtype), device=size.device
    )
    return registry.fast("attention", Operands(probe, probe, probe))[0] or "reference"
