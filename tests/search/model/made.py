"""Curves, costs and tables of them that a test writes down or draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiling.ranks import Ranks
from profiling.speed.cost_table import Cost, CostTable
from search.model.allocation import Allocation, Heads
from search.model.curves import Curves
from search.model.search_run import Measured
from search.model.task_losses import TaskLoss

LAYERS = 3
LENGTH = 1024
_START = {"a_shape": 1e-4, "vertical_slash": 3e-4, "block_sparse": 2e-4, "dense": 1e-4}


@dataclass
class FormulaRun:
    """A run without a model: losses are a formula of the reference, the allocation and the numbers.

    A set of prompts is its own reference. measured: every (reference, allocation, numbers)."""

    formula: Callable[[Any, Allocation, Any], Sequence[TaskLoss]]
    ranks: Ranks = field(default_factory=Ranks)
    measured: list[tuple[Any, Allocation, Any]] = field(default_factory=list)

    def reference(self, prompts: Any) -> Any:
        return prompts

    def measure(
        self,
        reference: Any,
        allocations: Sequence[Allocation],
        numbers: Any = None,
        *,
        name: str = "",
    ) -> list[Measured]:
        results = []
        for allocation in allocations:
            self.measured.append((reference, allocation, numbers))
            tasks = tuple(self.formula(reference, allocation, numbers))
            results.append(Measured(allocation=allocation, tasks=tasks))
        return results


def curves_of(change: np.ndarray, **changes: Any) -> Curves:
    """Without gradients: heads are weighed by their change."""
    zero = np.where(np.isnan(change), np.nan, 0.0)
    known = {
        "error": change,
        "recall": zero,
        "tiles": zero,
        "text_fisher": zero,
        "first_order": zero,
        "answer_fisher": zero,
    }
    return Curves(change=change, **known | {"text_tokens": 0, "texts": 0, "asked": 0} | changes)


def heads_of(
    seed: int, *, heads: int = 2, candidates: int = 4, tails: tuple[int, ...] = (64,)
) -> Heads:
    """Layer 1 is left alone; more cost is less change, and error goes its own way."""
    curves = {}
    costs = {}
    for tail in tails:
        rng = np.random.default_rng([seed, tail])
        shape = (LAYERS, heads, candidates)
        cost = np.sort(rng.exponential(size=shape), axis=-1) + 0.1
        change = -np.sort(
            -rng.exponential(size=shape) * rng.exponential(size=shape[:2])[..., None], axis=-1
        )
        error = rng.exponential(size=shape)
        text, answer = (change * rng.lognormal(sigma=0.5, size=shape) for _ in range(2))
        for values in (cost, change, error, text, answer):
            values[1] = np.nan
        curves[tail] = curves_of(
            change, error=error, text_fisher=text, answer_fisher=answer, texts=1, asked=1
        )
        costs[tail] = cost
    return Heads(curves=curves, costs=costs, all_keys=float(np.nanmax([*costs.values()])))


def linear_table(
    *, device: str = "Abacus 3000", tiles: tuple[int, ...] = (10, 40, 136), factor: float = 1.0
) -> CostTable:
    """A cost table of head dim 16 in fp32: for each kind a start, and 1 us a tile."""
    costs = [
        Cost(
            pattern=kind,
            dtype="float32",
            length=LENGTH,
            head_dim=16,
            heads=6,
            kv_heads=2,
            density=count / 136,
            tiles=6 * count,
            sparse_seconds=6 * factor * count * 1e-6,
            build_seconds=6 * factor * start,
            dense_seconds=6 * factor * 2e-3,
        )
        for kind, start in _START.items()
        for count in tiles
    ]
    return CostTable(
        device=device, backend="cpu", versions={"torch": "0"}, command="by hand", costs=tuple(costs)
    )
