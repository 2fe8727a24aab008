"""What attention takes on this machine with what a search chose: index builds and kernels, layer by layer."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan
from profiling.capture import LayerInputs, capture
from profiling.models import LoadedModel
from profiling.prompts import Prompt
from search.settle import Settlement

if TYPE_CHECKING:
    from search.refine import Problem

_REPEATS = 3


def attention_seconds(
    loaded: LoadedModel, prompt: Prompt, plans: Mapping[int, LayerPlan], *, backend: str, repeats: int = _REPEATS
) -> float:
    """Seconds of index builds and attention of all planned layers over a prompt: the sum of the layers' medians."""
    synchronize = _synchronizer(str(loaded.model.device))
    medians: list[float] = []

    def visit(inputs: LayerInputs) -> None:
        plan = plans.get(inputs.layer)
        if plan is None:
            return
        taken = []
        for turn in range(repeats + 1):
            synchronize()
            start = time.perf_counter()
            index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
            sparse_attention(
                inputs.q, inputs.k, inputs.v, index, scale=inputs.scale, softcap=inputs.softcap, backend=backend
            )
            synchronize()
            if turn:
                taken.append(time.perf_counter() - start)
        medians.append(statistics.median(taken))

    capture(loaded.model, torch.tensor([prompt.input_ids], device=loaded.model.device), visit)
    return sum(medians)


def plans_of(problem: Problem, settlement: Settlement, num_kv_heads: int) -> dict[int, LayerPlan]:
    """The plan of each layer that has one."""
    return {
        layer: LayerPlan([problem.candidates[c] for c in row], num_kv_heads, dense_tail=problem.dense_tail)
        for layer, row in enumerate(settlement.chosen)
        if row[0] >= 0
    }


def measure_scale(loaded: LoadedModel, problem: Problem, prompt: Prompt, *, backend: str) -> float:
    """Measured over predicted seconds of the budget spent with equal weights.

    The table times layers whose heads are all alike, on made-up inputs; the factor is what real layers make of that.
    """
    settlement = problem.settle({})
    with all_threads():
        measured = attention_seconds(
            loaded, prompt, plans_of(problem, settlement, problem.model.num_kv_heads), backend=backend
        )
    return measured / settlement.cost


@contextmanager
def all_threads() -> Iterator[None]:
    """All of the processor while other processes of a search wait: what is measured is what a server will have."""
    before = torch.get_num_threads()
    told = os.environ.get("HEADWISE_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(before, min(cores, int(told)) if told.isdecimal() else cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _synchronizer(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
