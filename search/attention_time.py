"""What attention takes on this machine with what a search chose, and all of the processor to measure it with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kernels.patterns import LayerPlan
from profiling.attention_time import attention_seconds
from profiling.models import LoadedModel
from profiling.prompts import Prompt
from search.settle import Settlement
from search.workers import is_worker

if TYPE_CHECKING:
    from search.refine import Problem


def measured_seconds(
    loaded: LoadedModel, problem: Problem, settlements: Sequence[Settlement], prompt: Prompt, *, backend: str
) -> list[float]:
    """Seconds of index builds and attention of all searched layers over a prompt, of each settlement in turns."""
    plans = {
        str(number): {
            layer: LayerPlan(
                [problem.candidates[c] for c in row], problem.model.num_kv_heads, dense_tail=problem.dense_tail
            )
            for layer, row in enumerate(settlement.chosen)
            if row[0] >= 0
        }
        for number, settlement in enumerate(settlements)
    }
    with all_threads():
        return list(attention_seconds(loaded, prompt, plans, backend=backend).values())


def measure_scale(loaded: LoadedModel, problem: Problem, prompt: Prompt, *, backend: str) -> float:
    """Measured over predicted seconds of the budget spent with equal weights.

    The table times layers whose heads are all alike, on made-up inputs; the factor is what real layers make of that.
    """
    settlement = problem.settle({})
    (seconds,) = measured_seconds(loaded, problem, [settlement], prompt, backend=backend)
    return seconds / settlement.cost


@contextmanager
def all_threads() -> Iterator[None]:
    """All of the processor while other processes of a search wait: what is measured is what a server will have."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A copy that --workers started was told its share; what the user said holds for the first process.
    told = "" if is_worker() else os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(max(before, min(cores, int(told)) if told.isdecimal() and int(told) else cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)
