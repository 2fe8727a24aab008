"""Seconds of attention on this machine: allocations of patterns, and dense attention.

Every measurement is of one layer's attention with its index builds, on the inputs that it has in
serving, with all that is compared taking turns. Dense attention by our kernel is among them: the
anchor, by which a machine that became slower or faster in between is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.patterns import LayerPlan
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.head_fidelity import attend, dense_of_layer
from profiling.models.loading import LoadedModel
from profiling.speed.latency import time_calls
from runtime.devices import execution_device

T = TypeVar("T")
ANCHOR = "dense by our kernel"
SDPA = "sdpa"
# Layers on which dense attention, which is alike in all, is timed: ours, and sdpa, which may take
# many times as long.
_ANCHORS = 3
_SDPAS = 2
# Interleaved rounds of each; their means count.
_ROUNDS = 2
# Times as long as the anchor that sdpa takes on a shorter prompt, from which on it is not timed on
# the longest one: it is not the faster of the two there either.
_SLOWER = 1.25
# Relative change of the anchor above which predictions are reported as made at another speed of the
# machine.
MOVED = 0.15


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of one prompt's attention over all searched layers, index builds included, by name.

    Attributes:
        layers: those that were timed; the seconds are theirs, scaled to all.
    """

    seconds: Mapping[str, float]
    layers: tuple[int, ...]

    def ratio(self, name: str) -> float:
        """Speed-up over the fastest dense baseline."""
        return self.dense / self.seconds[name]

    @property
    def dense(self) -> float:
        """Seconds of the fastest dense baseline: our kernel, or sdpa."""
        return min(self.seconds[name] for name in (ANCHOR, SDPA) if name in self.seconds)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlansToTime:
    """Plans by name that are timed on a prompt's first `tokens`.

    Dense attention is timed on a few of them, as ANCHOR and, with `sdpa`, as SDPA where torch can
    serve the layer. On the longest of several prompts SDPA is left out where it is clearly slower
    than ANCHOR on the next shorter one.

    Attributes:
        layers: number of layers, evenly spread; all if None.
    """

    tokens: int
    plans: Mapping[str, Mapping[int, LayerPlan]]
    layers: int | None = None
    sdpa: bool = False


def time_layers(
    loaded: LoadedModel,
    ids: Sequence[int],
    requests: Sequence[PlansToTime],
    searched: Sequence[int],
    *,
    look: Callable[[LayerInputs], object] = lambda inputs: None,
    backend: str = "auto",
) -> list[Timings]:
    """Time attention on the inputs of one prefill, which the first plans serve.

    The inputs of causal layers for a prompt's first tokens equal those of a prompt of these tokens
    alone, except for changes by the patterns of earlier layers.

    Args:
        loaded: the model.
        ids: of a real prompt.
        requests: plans and lengths to time, each separately.
        searched: the layers that count; all plans have them.
        look: is shown each layer on which the first plans are timed.
        backend: as for kernels.attention.sparse_attention.
    """
    clocks = [_Clock(request, searched, backend) for request in requests]
    ascending = sorted(clocks, key=lambda clock: clock.tokens)
    serving = next(iter(requests[0].plans.values()))

    def visit(inputs: LayerInputs) -> Tensor | None:
        if inputs.layer not in searched:
            return None
        # Run once first, so that the first timing finds its inputs where the others do.
        out = _by_plan(inputs, serving[inputs.layer], backend)()
        for shorter, clock in zip([None, *ascending], ascending, strict=False):
            if clock is ascending[-1] and shorter is not None and not clock.seconds:
                clock.leave_out_slow_sdpa(shorter)
            clock.time(inputs)
        if inputs.layer in clocks[0].layers:
            look(inputs)
        return out

    with all_threads():
        capture(
            loaded.model,
            torch.tensor([list(ids)], device=execution_device(loaded.model), dtype=torch.long),
            visit,
        )
    return [Timings(seconds=clock.seconds, layers=tuple(clock.layers)) for clock in clocks]


class _Clock:
    """Adds up the seconds of one PlansToTime, layer by layer."""

    def __init__(self, request: PlansToTime, searched: Sequence[int], backend: str) -> None:
        self.tokens = request.tokens
        self.layers = spread(searched, request.layers)
        self.seconds: dict[str, float] = {}
        self._request = request
        self._backend = backend
        self._all = len(searched)
        self._timed = dict.fromkeys(request.plans, self.layers) | {
            ANCHOR: spread(self.layers, _ANCHORS)
        }
        if request.sdpa:
            self._timed[SDPA] = spread(self.layers, _SDPAS)

    def leave_out_slow_sdpa(self, shorter: _Clock) -> None:
        """Drop SDPA where it is clearly slower than the anchor on a shorter prompt."""
        taken = {
            name: seconds * len(shorter._timed[name]) for name, seconds in shorter.seconds.items()
        }
        if SDPA in taken and taken[SDPA] > _SLOWER * taken[ANCHOR]:
            self._timed.pop(SDPA, None)

    def time(self, inputs: LayerInputs) -> None:
        """One layer, where it is among those that are timed."""
        layer = inputs.layer
        before = slice(0, self.tokens)
        prompt = replace(
            inputs, q=inputs.q[:, :, before], k=inputs.k[:, :, before], v=inputs.v[:, :, before]
        )
        runs = {
            name: _by_plan(prompt, plans[layer], self._backend)
            for name, plans in self._request.plans.items()
        }
        runs[ANCHOR] = lambda: dense_of_layer(prompt, backend=self._backend)[0]
        if inputs.logits.softcap is None and inputs.logits.sinks is None:
            runs[SDPA] = _by_sdpa(prompt)
        runs = {name: run for name, run in runs.items() if layer in self._timed.get(name, ())}
        rounds = time_calls(
            runs,
            repeats=_ROUNDS,
            device=str(inputs.q.device),
            warm_up=not self.seconds,
            quiet=True,
        )
        for name, seconds in rounds.items():
            scale = self._all / len(self._timed[name])
            self.seconds[name] = self.seconds.get(name, 0.0) + fmean(seconds) * scale


@contextmanager
def all_threads() -> Iterator[None]:
    """Use the whole processor, as a server would; the user's setting is kept to."""
    before = torch.get_num_threads()
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    setting = os.environ.get("OMP_NUM_THREADS", "")
    # torchrun sets it to 1 for each of its processes, which wait meanwhile.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and setting.isdecimal() and int(setting):
        cores = min(cores, int(setting))
    torch.set_num_threads(max(before, cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def spread(values: Sequence[T], count: int | None) -> list[T]:
    """Select `count` values, evenly spread; all if None."""
    if count is None or count >= len(values):
        return list(values)
    return [values[at] for at in np.linspace(0, len(values) - 1, count).round().astype(int)]


def _by_plan(inputs: LayerInputs, plan: LayerPlan, backend: str) -> Callable[[], Tensor]:
    """A layer's attention by its patterns, index build included, ready to be timed."""

    def run() -> Tensor:
        return attend(inputs, plan.build(inputs.q, inputs.k, scale=inputs.scale), backend)[0]

    return run


def _by_sdpa(inputs: LayerInputs) -> Callable[[], Tensor]:
    """A layer's dense attention by torch, ready to be timed; it has neither soft-cap nor sinks."""

    def run() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *(inputs.q, inputs.k, inputs.v),
            is_causal=True,
            scale=inputs.scale,
            enable_gqa=True,
        )

    return run
