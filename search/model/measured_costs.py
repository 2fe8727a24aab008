"""What candidates cost on this machine: some of each kind are timed, and then allocations that mix
kinds in a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from artifacts import ModelInfo
from kernels.index import num_tiles
from kernels.patterns import LayerPlan, Pattern, make
from profiling.environment import environment
from profiling.inside.capture import LayerInputs
from profiling.inside.head_fidelity import worked_tiles
from profiling.progress import phase
from profiling.speed.cost_table import Cost, CostTable
from profiling.speed.layer_times import ANCHOR, Timed, Timings, spread, time_layers
from search.model.allocation import Allocation, Heads
from search.model.costs import Costs, costs_by, flops
from search.model.setup import Setup

# Layers on which candidates and allocations are timed.
_LAYERS = 5
# Of each kind so many candidates are timed, from the smallest to the largest: a line through them
# gives the others.
_OF_A_KIND = 4
# Budgets of the allocations that are timed, as shares of the one that was asked for.
_SHARES = (1.0, 0.5, 2.0)


def measured(
    setup: Setup, ids: Sequence[int], heads_by: Callable[[Costs], Heads]
) -> dict[str, Any]:
    """Kinds by their tiles, and what mixing them in a layer adds; as plain data, which `costs_of`
    takes.

    Args:
        setup: the search.
        ids: of a real prompt of about its length.
        heads_by: the curves with costs.
    """
    mixed = _mixed(
        setup, heads_by(flops(setup.model, length=setup.length, dtype=setup.config.dtype))
    )
    kinds = {repr(pattern): pattern for pattern in _some_of_each_kind(setup.patterns)}
    one_kind = {
        key: dict.fromkeys(
            setup.searched, LayerPlan([pattern] * setup.model.num_heads, setup.model.num_kv_heads)
        )
        for key, pattern in kinds.items()
    }
    tiles: dict[str, list[float]] = {key: [] for key in kinds}

    def count(inputs: LayerInputs) -> None:
        for key, by_layer in one_kind.items():
            index = by_layer[inputs.layer].build(inputs.q, inputs.k, scale=inputs.scale)
            tiles[key].append(float(worked_tiles(inputs, index, backend=setup.backend).sum()))

    plans = {str(at): setup.plans(one) for at, one in enumerate(mixed)} | one_kind
    asked = Timed(tokens=len(ids), plans=plans, layers=_LAYERS)
    with phase("timing candidates", 1, "passes") as shown:
        (timings,) = time_layers(
            setup.loaded, ids, [asked], setup.searched, look=count, backend=setup.backend
        )
        shown.update()
    table = _table(setup, len(ids), timings, kinds, tiles)
    heads = heads_by(costs_by(table, setup.model, length=setup.length, dtype=setup.config.dtype))
    # Of the layers that are timed: an allocation gives each layer another share.
    each = len(setup.searched) / len(timings.layers)
    layers = list(timings.layers)
    predicted = [each * float(one.pick(heads.costs[one.tail])[layers].sum()) for one in mixed]
    scale, overhead = line_through(
        predicted, [timings.seconds[str(at)] for at in range(len(mixed))]
    )
    fit = [scale, overhead / (len(setup.searched) * setup.model.num_heads)]
    return {**vars(table), "costs": [vars(cost) for cost in table.costs], "fit": fit}


def costs_of(found: Mapping[str, Any], model: ModelInfo, *, length: int, dtype: str) -> Costs:
    """The costs that `measured` found."""
    fields = dict(found)
    scale, overhead = fields.pop("fit")
    table = CostTable(**fields | {"costs": tuple(Cost(**cost) for cost in fields["costs"])})
    return costs_by(table, model, length=length, dtype=dtype).brought_to(
        scale=scale, overhead=overhead
    )


def _mixed(setup: Setup, heads: Heads) -> list[Allocation]:
    """Allocations of some budgets, whatever they are counted in: kinds as a layer mixes them."""
    tail = min(heads.curves)
    least = heads.least(tail) * (1 + 1e-9)
    return [
        heads.by_model(max(heads.total(setup.config.share * share), least), tail)
        for share in _SHARES
    ]


def _table(
    setup: Setup,
    length: int,
    timings: Timings,
    kinds: Mapping[str, Pattern],
    tiles: Mapping[str, Sequence[float]],
) -> CostTable:
    """What kinds of patterns cost by the tiles that they compute."""
    where = environment(str(setup.loaded.model.device))
    name = where.pop("device")
    causal = num_tiles(length) * (num_tiles(length) + 1) / 2
    layers = len(setup.searched)
    heads = setup.model.num_heads
    costs = [
        Cost(
            pattern=pattern.kind,
            dtype=setup.config.dtype,
            length=length,
            head_dim=setup.model.head_dim,
            heads=heads,
            kv_heads=setup.model.num_kv_heads,
            # Layers differ in what the same sizes compute, and one's times jump about: their means
            # are a point.
            density=float(np.mean(tiles[key])) / heads / causal,
            tiles=round(np.mean(tiles[key])),
            # An index build is part of what serving takes, and is timed with it.
            sparse_seconds=timings.seconds[key] / layers,
            build_seconds=0.0,
            dense_seconds=timings.seconds[ANCHOR] / layers,
        )
        for key, pattern in kinds.items()
    ]
    command = setup.config.command or "headwise search"
    return CostTable(
        device=name, backend=setup.backend, versions=where, command=command, costs=tuple(costs)
    )


def line_through(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """(factor, constant) with the least squares of relative errors.

    Neither is below 0, and the factor is at least half of what it would be without a constant:
    where prompts are short and times jump about, sizes must not look as if they were free."""
    x = np.asarray(predicted, dtype=np.float64)
    y = np.asarray(measured, dtype=np.float64)
    ratio = x / y

    def best_factor(constant: float) -> float:
        return float((ratio * (1 - constant / y)).sum() / (ratio**2).sum())

    (_, constant), *_ = np.linalg.lstsq(
        np.stack([ratio, 1 / y], axis=-1), np.ones_like(y), rcond=None
    )
    # The factor falls with the constant in a straight line: this much takes half of it away.
    most = best_factor(0.0) / 2 / (ratio / y).sum() * (ratio**2).sum()
    constant = min(max(float(constant), 0.0), float(most))
    return best_factor(constant), constant


def _some_of_each_kind(candidates: Sequence[Pattern]) -> list[Pattern]:
    """Some candidates of each kind, small and large."""
    kinds: dict[str, list[Pattern]] = {}
    for pattern in candidates:
        if getattr(pattern, "coverage", None) is None:
            kinds.setdefault(pattern.kind, []).append(pattern)
    kinds.setdefault("dense", [make("dense")])
    found = []
    for like in kinds.values():
        ordered = sorted(
            like, key=lambda p: sum(v for v in vars(p).values() if type(v) in (int, float))
        )
        found += spread(ordered, _OF_A_KIND)
    return found
