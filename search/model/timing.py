"""What attention takes on this machine: allocations, and dense attention.

Every measurement is of one layer's attention with its index builds, on the inputs that it has in serving, with all
that is compared taking turns. Dense attention by our kernel is among them: the anchor, by which a machine that
became slower or faster in between is known.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.patterns import LayerPlan
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import dense_attention
from profiling.models.loading import LoadedModel
from profiling.speed.attention_time import by_plan, by_sdpa

T = TypeVar("T")
ANCHOR, SDPA = "dense by our kernel", "sdpa"
# Layers on which dense attention, which is alike in all, is timed: ours, and sdpa, which may take many times as long.
_ANCHORS, _SDPAS = 3, 2
# Of each, in turn; their medians count.
_TURNS = 2
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
    look: Callable[[LayerInputs], object] = lambda inputs: None,
    backend: str = "auto",
) -> Timings:
    """Time plans by name, and dense attention as ANCHOR and, if asked for, SDPA.

    Args:
        loaded: the model.
        ids: of a real prompt.
        plans: of each searched layer, some at least; the first ones' output is what the pass goes on with.
        searched: the layers that count.
        layers: how many of them are timed, spread evenly; the sum is then scaled to all. All if None.
        sdpa: whether torch's dense attention is timed, too, where it can serve the layer. Both dense ones are timed on
            a few layers.
        look: is shown each layer that is timed.
        backend: as for kernels.attention.sparse_attention.
    """
    chosen = spread(searched, layers)
    timed = {name: set(chosen) for name in plans} | {ANCHOR: set(spread(chosen, _ANCHORS))}
    if sdpa:
        timed[SDPA] = set(spread(chosen, _SDPAS))
    sums: dict[str, float] = {}

    def visit(inputs: LayerInputs) -> Tensor | None:
        layer = inputs.layer
        if layer not in searched:
            return None
        runs = {name: by_plan(inputs, by_layer[layer], backend) for name, by_layer in plans.items()}
        serve = next(iter(runs.values()))
        runs[ANCHOR] = lambda: dense_attention(inputs, backend=backend)[0]
        if inputs.softcap is None:
            runs[SDPA] = by_sdpa(inputs)
        for name, seconds in in_turn({name: runs[name] for name in runs if layer in timed.get(name, ())}).items():
            sums[name] = sums.get(name, 0.0) + seconds * len(searched) / len(timed[name])
        if layer in chosen:
            look(inputs)
        return serve()

    with all_threads():
        capture(loaded.model, torch.tensor([list(ids)], device=loaded.model.device), visit)
    return Timings(seconds=sums, layers=tuple(chosen))


def in_turn(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each, all taking turns after one that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_TURNS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


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


def spread(some: Sequence[T], count: int | None) -> list[T]:
    """So many of them, evenly spread; all if None."""
    if count is None or count >= len(some):
        return list(some)
    return [some[at] for at in np.linspace(0, len(some) - 1, count).round().astype(int)]
