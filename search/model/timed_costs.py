"""Costs of candidates on this machine, in seconds.

Some candidates of each kind are timed on layers of a real prompt, and then allocations that mix
kinds in a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernels.patterns import LayerPlan, Pattern, make
from profiling.environment import environment
from profiling.inside.capture import LayerInputs
from profiling.inside.head_fidelity import worked_tiles
from profiling.progress import phase
from profiling.quality.sequences import TokenSequence
from profiling.speed.layer_times import (
    ANCHOR,
    PlansToTime,
    Timings,
    all_threads,
    spread,
    time_layers,
)
from runtime.devices import execution_device
from search.model.allocation import Allocation, CostCurves
from search.model.candidates import LAST_Q
from search.model.cost_table import Cost, CostTable
from search.model.costs import Costs
from search.model.curves import Curves
from search.model.run import SearchRun

# Layers on which candidates and allocations are timed.
_LAYERS = 5
# Candidates of a kind that are timed, small to large; a line predicts the others.
_OF_A_KIND = 4
# Budgets of the allocations that are timed, as fractions of dense attention's cost.
_SHARES = (0.3, 0.15, 0.6)


def time_candidates(
    run: SearchRun,
    sequence: TokenSequence,
    curves: Mapping[int, Curves],
) -> Costs:
    """Time candidates in the first rank while the others wait; all ranks get the costs.

    Args:
        run: the search.
        sequence: a real prompt of about its length.
        curves: by dense tail.
    """
    with all_threads():
        machine = environment(run.device)
    depends = {"sequence": sequence.digest, "machine": machine}
    unit = run.ledger.unit("times", depends)
    record = None
    if run.ranks.is_first:
        record = run.ledger.once(unit, lambda: _time(run, sequence, curves))
    record = dict(run.ranks.broadcast(record))
    scale, overhead = record.pop("fit")
    costs = tuple(Cost(**cost) for cost in record.pop("costs"))
    table = CostTable(**record, costs=costs)
    return Costs.measured(
        table, run.model, length=run.length, dtype=run.dtype, scale=scale, overhead=overhead
    )


def _time(
    run: SearchRun,
    sequence: TokenSequence,
    curves: Mapping[int, Curves],
) -> dict[str, Any]:
    """Time kinds by their tiles, and fit what mixing them in a layer adds.

    Returns:
        The fields of a CostTable, and `fit`, the factor and constant of the model's layers.
    """
    model = run.model
    ids = sequence.ids[: sequence.context]
    # Operations choose what to time: seconds are not known yet.
    flops = Costs.flops(model, length=run.length, dtype=run.dtype)
    mixed = _mixed_allocations(CostCurves.from_curves(curves, flops, run.candidates))
    patterns = {repr(pattern): pattern for pattern in _some_of_each_kind(run.candidates)}
    plans_of_one = {
        key: dict.fromkeys(run.layers, LayerPlan([pattern] * model.num_heads, model.num_kv_heads))
        for key, pattern in patterns.items()
    }
    tiles: dict[str, list[float]] = {key: [] for key in patterns}

    def count(inputs: LayerInputs) -> None:
        for key, plans in plans_of_one.items():
            index = plans[inputs.layer].build(inputs.q, inputs.k, scale=inputs.scale)
            tiles[key].append(float(worked_tiles(inputs, index, backend=run.backend).sum()))

    # The first serves the pass on whose inputs all are timed.
    plans = {str(at): run.plans(allocation) for at, allocation in enumerate(mixed)} | plans_of_one
    timed = PlansToTime(tokens=len(ids), plans=plans, layers=_LAYERS)
    with phase("timing candidates", 1, "passes") as shown:
        (timings,) = time_layers(
            run.loaded, ids, [timed], run.layers, look=count, backend=run.backend
        )
        shown.update()
    table = _table(run, len(ids), timings, patterns, tiles)
    by_table = Costs.measured(table, model, length=run.length, dtype=run.dtype)
    heads = CostCurves.from_curves(curves, by_table, run.candidates)
    # Summed over the timed layers, which differ in cost, and scaled to all layers.
    to_all_layers = len(run.layers) / len(timings.layers)
    layers = list(timings.layers)
    costs = [mix.pick(heads.costs[mix.tail])[layers].sum() for mix in mixed]
    predicted = [to_all_layers * float(cost) for cost in costs]
    seconds = [timings.seconds[str(at)] for at in range(len(mixed))]
    scale, overhead = line_through(predicted, seconds)
    fit = [scale, overhead / (len(run.layers) * model.num_heads)]
    return {**vars(table), "costs": [vars(cost) for cost in table.costs], "fit": fit}


def _mixed_allocations(heads: CostCurves) -> list[Allocation]:
    """Allocations of some budgets, which mix kinds as a layer does; costs may be of any unit."""
    tail = min(heads.curves)
    cheapest = heads.least(tail) * (1 + 1e-9)
    totals = [max(heads.total(share), cheapest) for share in _SHARES]
    return [heads.allocate(total, tail) for total in totals]


def _table(
    run: SearchRun,
    length: int,
    timings: Timings,
    patterns: Mapping[str, Pattern],
    tiles: Mapping[str, Sequence[float]],
) -> CostTable:
    """The cost table of the kinds of these patterns, by the tiles that they compute."""
    layers = len(run.layers)
    heads = run.model.num_heads
    costs = [
        Cost(
            pattern=pattern.kind,
            dtype=run.dtype,
            length=length,
            head_dim=run.model.head_dim,
            heads=heads,
            # The same sizes compute different tiles by layer, and one layer's times are noisy:
            # the means over layers are a point.
            tiles=round(np.mean(tiles[key])),
            # An index build is part of what serving takes, and is timed with it.
            seconds=timings.seconds[key] / layers,
            dense_seconds=timings.seconds[ANCHOR] / layers,
        )
        for key, pattern in patterns.items()
    ]
    device = environment(str(execution_device(run.loaded.model)))["device"]
    return CostTable(device=device, costs=tuple(costs))


def line_through(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Fit (factor, constant) by least squares of relative errors.

    Neither is below 0, and the factor is at least half of its value without a constant:
    where prompts are short and times jump about, sizes must not look as if they were free.
    """
    x = np.asarray(predicted, dtype=np.float64)
    y = np.asarray(measured, dtype=np.float64)
    ratio = x / y

    def best_factor(constant: float) -> float:
        return float((ratio * (1 - constant / y)).sum() / (ratio**2).sum())

    (_, constant), *_ = np.linalg.lstsq(
        np.stack([ratio, 1 / y], axis=-1), np.ones_like(y), rcond=None
    )
    # The factor falls with the constant in a straight line: this much takes half of it away.
    limit = best_factor(0.0) / 2 / (ratio / y).sum() * (ratio**2).sum()
    constant = min(max(float(constant), 0.0), float(limit))
    return best_factor(constant), constant


def _some_of_each_kind(candidates: Sequence[Pattern]) -> list[Pattern]:
    """Some candidates of each kind, small and large.

    Those of more queries are left out: Costs adds their estimates to the times of the others.
    """
    kinds: dict[str, list[Pattern]] = {}
    for pattern in candidates:
        broad = getattr(pattern, "last_q", LAST_Q) > LAST_Q
        if getattr(pattern, "coverage", None) is None and not broad:
            kinds.setdefault(pattern.kind, []).append(pattern)
    kinds.setdefault("dense", [make("dense")])
    sample = []
    for patterns in kinds.values():
        sample += spread(sorted(patterns, key=_size), _OF_A_KIND)
    return sample


def _size(pattern: Pattern) -> float:
    """The sum of a pattern's sizes."""
    return sum(value for value in vars(pattern).values() if type(value) in (int, float))
