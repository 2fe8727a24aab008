"""What candidates cost on this machine: some of each kind are timed, and then allocations that mix kinds in a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from artifacts import ModelInfo
from kernels.index import num_tiles
from kernels.patterns import LayerPlan, Pattern, make
from profiling.environment import environment
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import dense_attention, worked_tiles
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.speed.attention_time import by_plan
from profiling.speed.cost_table import Cost, CostTable
from search.model.allocation import Heads
from search.model.costs import Costs, costs_by
from search.model.timing import ANCHOR, all_threads, in_turn, spread, time_layers

# Layers on which candidates are timed, and allocations.
_LAYERS, _MIXED_LAYERS = 4, 6
# Of each kind so many candidates are timed, from the smallest to the largest: a line through them gives the others.
_OF_A_KIND = 4
# Budgets of the allocations that are timed, as shares of the one that was asked for.
_SHARES = (1.0, 0.5, 2.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Timing:
    """What is timed. ids: of a real prompt of about `length` tokens. searched: the layers that count."""

    loaded: LoadedModel
    model: ModelInfo
    length: int
    ids: Sequence[int]
    candidates: Sequence[Pattern]
    searched: Sequence[int]
    dtype: str
    backend: str
    command: str


def measured(timing: Timing, heads_by: Callable[[Costs], Heads], budget: float) -> dict[str, Any]:
    """Kinds by their tiles, and what mixing them in a layer adds; as plain data, which `costs_of` takes.

    Args:
        timing: what is timed.
        heads_by: the curves with costs.
        budget: that was asked for: allocations near it are timed.
    """
    with phase("timing candidates", 2, "passes") as shown:
        table = _table(timing)
        shown.update()
        costs = costs_by(table, timing.model, length=timing.length, dtype=timing.dtype)
        fit = _fit(timing, heads_by(costs), budget)
        shown.update()
    return {**vars(table), "costs": [vars(cost) for cost in table.costs], "fit": list(fit)}


def costs_of(found: Mapping[str, Any], model: ModelInfo, *, length: int, dtype: str) -> Costs:
    """The costs that `measured` found."""
    fields = dict(found)
    scale, overhead = fields.pop("fit")
    table = CostTable(**fields | {"costs": tuple(Cost(**cost) for cost in fields["costs"])})
    return costs_by(table, model, length=length, dtype=dtype).brought_to(scale=scale, overhead=overhead)


def _fit(timing: Timing, heads: Heads, budget: float) -> tuple[float, float]:
    """(factor, seconds of each head) between what the table predicts and what mixed layers take."""
    tail = min(heads.curves)
    least = heads.least(tail) * (1 + 1e-9)
    made = [heads.by_model(max(heads.total(budget * share), least), tail) for share in _SHARES]
    plans = {str(i): one.plans(timing.candidates, timing.model.num_kv_heads) for i, one in enumerate(made)}
    timings = time_layers(
        timing.loaded, timing.ids, plans, timing.searched, layers=_MIXED_LAYERS, backend=timing.backend
    )
    # Of the layers that are timed: an allocation gives each layer another share.
    each = len(timing.searched) / len(timings.layers)
    predicted = [each * float(one.pick(heads.costs[tail])[list(timings.layers)].sum()) for one in made]
    scale, overhead = line_through(predicted, [timings.seconds[name] for name in plans])
    return scale, overhead / (len(timing.searched) * timing.model.num_heads)


def _table(timing: Timing) -> CostTable:
    """What kinds of patterns cost by the tiles that they compute, on some layers of the prompt."""
    timed = {repr(pattern): pattern for pattern in _some_of_each_kind(timing.candidates)}
    chosen = spread(timing.searched, _LAYERS)
    found: dict[str, list[tuple[float, float, float]]] = {key: [] for key in timed}
    shape: dict[str, int] = {}
    where = environment(str(timing.loaded.model.device))
    name = where.pop("device")

    def visit(inputs: LayerInputs) -> Tensor | None:
        if inputs.layer not in chosen:
            return None
        heads, groups = inputs.q.shape[1], inputs.k.shape[1]
        plans = {key: LayerPlan([pattern] * heads, groups) for key, pattern in timed.items()}
        runs: dict[str, Callable[[], Tensor]] = {
            key: by_plan(inputs, plan, timing.backend) for key, plan in plans.items()
        }
        runs[ANCHOR] = lambda: dense_attention(inputs, backend=timing.backend)[0]
        taken = in_turn(runs)
        shape.update(heads=heads, kv_heads=groups, head_dim=inputs.q.shape[3])
        for key, plan in plans.items():
            index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
            tiles = float(worked_tiles(inputs, index, backend=timing.backend).sum())
            found[key].append((tiles, taken[key], taken[ANCHOR]))
        return dense_attention(inputs, backend=timing.backend)[0]

    with all_threads():
        capture(timing.loaded.model, torch.tensor([list(timing.ids)], device=timing.loaded.model.device), visit)
    causal = num_tiles(len(timing.ids)) * (num_tiles(len(timing.ids)) + 1) / 2
    costs = []
    for key, layers in found.items():
        # Layers differ in what the same sizes compute, and one's times jump about: their means are a point of the line.
        tiles, seconds, dense = np.mean(layers, axis=0)
        costs.append(
            Cost(
                pattern=timed[key].kind,
                dtype=timing.dtype,
                length=len(timing.ids),
                density=float(tiles) / shape["heads"] / causal,
                tiles=round(tiles),
                # An index build is part of what serving takes, and is timed with it.
                sparse_seconds=float(seconds),
                build_seconds=0.0,
                dense_seconds=float(dense),
                **shape,
            )
        )
    return CostTable(device=name, backend=timing.backend, versions=where, command=timing.command, costs=tuple(costs))


def line_through(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """(factor, constant) with the least squares of relative errors.

    Neither is below 0, and the factor is at least half of what it would be without a constant: where prompts are short
    and times jump about, sizes must not look as if they were free.
    """
    x, y = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    ratio = x / y

    def best_factor(constant: float) -> float:
        return float((ratio * (1 - constant / y)).sum() / (ratio**2).sum())

    (_, constant), *_ = np.linalg.lstsq(np.stack([ratio, 1 / y], axis=-1), np.ones_like(y), rcond=None)
    # The factor falls with the constant in a straight line: this much takes half of it away.
    most = best_factor(0.0) / 2 / (ratio / y).sum() * (ratio**2).sum()
    constant = min(max(float(constant), 0.0), float(most))
    return best_factor(constant), constant


def _some_of_each_kind(candidates: Sequence[Pattern]) -> list[Pattern]:
    """Some candidates of each kind, small and large; dense is one of them."""
    kinds: dict[str, list[Pattern]] = {}
    for pattern in candidates:
        if getattr(pattern, "coverage", None) is None:
            kinds.setdefault(pattern.kind, []).append(pattern)
    kinds.setdefault("dense", [make("dense")])
    found = []
    for like in kinds.values():
        ordered = sorted(like, key=lambda p: sum(v for v in vars(p).values() if type(v) in (int, float)))
        found += _spread_of(ordered)
    return found


def _spread_of(patterns: Sequence[Pattern]) -> list[Pattern]:
    places = np.linspace(0, len(patterns) - 1, min(_OF_A_KIND, len(patterns))).round().astype(int)
    return [patterns[at] for at in places]
