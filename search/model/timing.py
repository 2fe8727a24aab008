"""What attention takes on this machine: candidates on the layers of a real prompt, allocations, and dense attention.

Every measurement is of one layer's attention with its index builds, on the inputs that dense attention gives it, with
all that is compared taking turns. Dense attention by our kernel is among them: the anchor, by which a machine that
became slower or faster in between is known.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.index import num_tiles
from kernels.patterns import LayerPlan, Pattern, make
from profiling.bench import environment
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import dense_attention
from profiling.models.loading import LoadedModel
from profiling.speed.attention_time import by_plan, by_sdpa
from profiling.speed.cost_table import Cost, CostTable

ANCHOR, SDPA = "dense by our kernel", "sdpa"
# Layers on which candidates and dense attention, which is alike in all, are timed; turns of each allocation.
_LAYERS, _DENSE_LAYERS, _TURNS = 4, 3, 3
# Of each kind so many candidates are timed, from the smallest to the largest: a line through them gives the others.
_OF_A_KIND = 4
# The anchor may have moved so much before predictions are said to be of another speed of the machine.
MOVED = 0.15


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of one prompt's attention over all searched layers, index builds included, by name.

    layers: those that were timed; the seconds are theirs, scaled to all.
    """

    seconds: Mapping[str, float]
    layers: tuple[int, ...]

    def ratio(self, name: str) -> float:
        """How many times as fast as the better dense attention."""
        return self.dense / self.seconds[name]

    @property
    def dense(self) -> float:
        """The better of our kernel and sdpa."""
        return min(self.seconds[name] for name in (ANCHOR, SDPA) if name in self.seconds)


def time_layers(
    loaded: LoadedModel,
    ids: Sequence[int],
    plans: Mapping[str, Mapping[int, LayerPlan]],
    searched: Sequence[int],
    *,
    layers: int | None = None,
    sdpa: bool = False,
    backend: str = "auto",
    turns: int = _TURNS,
) -> Timings:
    """Time plans by name, and dense attention as ANCHOR and, if asked for, SDPA.

    Args:
        loaded: the model.
        ids: of a real prompt.
        plans: of each searched layer.
        searched: the layers that count.
        layers: how many of them are timed, spread evenly; the sum is then scaled to all. All if None.
        sdpa: whether torch's dense attention is timed, too, where it can serve the layer. Both dense ones are timed on
            a few layers: they take long, and alike in all.
        backend: as for kernels.attention.sparse_attention.
        turns: of each, in turn; their medians count.
    """
    chosen = _spread(searched, layers)
    few = _spread(chosen, _DENSE_LAYERS)
    sums: dict[str, float] = {}

    def visit(inputs: LayerInputs) -> Tensor | None:
        if inputs.layer not in chosen:
            return None
        runs = {name: by_plan(inputs, by_layer[inputs.layer], backend) for name, by_layer in plans.items()}
        if inputs.layer in few:
            runs[ANCHOR] = lambda: dense_attention(inputs, backend=backend)[0]
            if sdpa and inputs.softcap is None:
                runs[SDPA] = by_sdpa(inputs)
        for name, seconds in in_turn(runs, turns).items():
            timed = len(chosen) if name in plans else len(few)
            sums[name] = sums.get(name, 0.0) + seconds * len(searched) / timed
        return dense_attention(inputs, backend=backend)[0]

    with all_threads():
        capture(loaded.model, torch.tensor([list(ids)], device=loaded.model.device), visit)
    return Timings(seconds=sums, layers=tuple(chosen))


def time_candidates(
    loaded: LoadedModel,
    ids: Sequence[int],
    candidates: Sequence[Pattern],
    searched: Sequence[int],
    *,
    dtype: str,
    command: str,
    backend: str = "auto",
) -> CostTable:
    """What kinds of patterns cost by the tiles that they compute, as a cost table, on some layers of a real prompt."""
    timed = {pattern_key(pattern): pattern for pattern in _some_of_each_kind(candidates)}
    chosen = _spread(searched, _LAYERS)
    found: dict[str, list[tuple[float, float, float]]] = {key: [] for key in timed}
    shape: dict[str, int] = {}
    where = environment(str(loaded.model.device))
    name = where.pop("device")

    def visit(inputs: LayerInputs) -> Tensor | None:
        if inputs.layer not in chosen:
            return None
        heads, groups = inputs.q.shape[1], inputs.k.shape[1]
        plans = {key: LayerPlan([pattern] * heads, groups) for key, pattern in timed.items()}
        runs: dict[str, Callable[[], Tensor]] = {key: by_plan(inputs, plan, backend) for key, plan in plans.items()}
        runs[ANCHOR] = lambda: dense_attention(inputs, backend=backend)[0]
        taken = in_turn(runs, 2)
        shape.update(heads=heads, kv_heads=groups, head_dim=inputs.q.shape[3])
        for key, plan in plans.items():
            tiles = int(plan.build(inputs.q, inputs.k, scale=inputs.scale).computed_tiles().sum())
            found[key].append((tiles, taken[key], taken[ANCHOR]))
        return dense_attention(inputs, backend=backend)[0]

    with all_threads():
        capture(loaded.model, torch.tensor([list(ids)], device=loaded.model.device), visit)
    causal = num_tiles(len(ids)) * (num_tiles(len(ids)) + 1) / 2
    costs = []
    for key, layers in found.items():
        # Layers differ in what the same sizes compute, and one's times jump about: their means are a point of the line.
        tiles, seconds, dense = np.mean(layers, axis=0)
        costs.append(
            Cost(
                pattern=timed[key].kind,
                dtype=dtype,
                length=len(ids),
                density=float(tiles) / shape["heads"] / causal,
                tiles=round(tiles),
                # An index build is part of what serving takes, and is timed with it.
                sparse_seconds=float(seconds),
                build_seconds=0.0,
                dense_seconds=float(dense),
                **shape,
            )
        )
    return CostTable(device=name, backend=backend, versions=where, command=command, costs=tuple(costs))


def pattern_key(pattern: Pattern) -> str:
    """Tells a pattern from others."""
    return repr(pattern)


def in_turn(runs: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median seconds of each, all taking turns after one that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


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


@contextmanager
def all_threads() -> Iterator[None]:
    """All of the processor, so that what is measured is what a server will have; what the user set is kept to."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torchrun sets it to 1 for each of its processes, which wait meanwhile.
    told = "" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(max(before, min(cores, int(told)) if told.isdecimal() and int(told) else cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _spread(layers: Sequence[int], count: int | None) -> list[int]:
    if count is None or count >= len(layers):
        return list(layers)
    return [layers[at] for at in np.linspace(0, len(layers) - 1, count).round().astype(int)]


def _some_of_each_kind(candidates: Sequence[Pattern]) -> list[Pattern]:
    """Some candidates of each kind, small and large; dense is one of them."""
    kinds: dict[str, list[Pattern]] = {}
    for pattern in candidates:
        if getattr(pattern, "coverage", None) is None:
            kinds.setdefault(pattern.kind, []).append(pattern)
    kinds.setdefault("dense", [make("dense")])
    found = []
    for like in kinds.values():
        ordered = sorted(like, key=lambda p: sum(v for v in vars(p).values() if type(v) is int))
        found += _spread_of(ordered)
    return found


def _spread_of(patterns: Sequence[Pattern]) -> list[Pattern]:
    places = np.linspace(0, len(patterns) - 1, min(_OF_A_KIND, len(patterns))).round().astype(int)
    return [patterns[at] for at in places]
