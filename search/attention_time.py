"""What attention takes on this machine with what a search chose, and all of the processor to measure it with."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    loaded: LoadedModel, problem: Problem, settlement: Settlement, prompt: Prompt, *, backend: str
) -> float:
    """Seconds of index builds and attention of all searched layers over a prompt."""
    plans = {
        layer: LayerPlan(
            [problem.candidates[c] for c in row], problem.model.num_kv_heads, dense_tail=problem.dense_tail
        )
        for layer, row in enumerate(settlement.chosen)
        if row[0] >= 0
    }
    with all_threads():
        return attention_seconds(loaded, prompt, {"settlement": plans}, backend=backend)["settlement"]


def measure_scale(loaded: LoadedModel, problem: Problem, prompt: Prompt, *, backend: str) -> float:
    """Measured over predicted seconds of the budget spent with equal weights.

    The table times layers whose heads are all alike, on made-up inputs; the factor is what real layers make of that.
    """
    settlement = problem.settle({})
    return measured_seconds(loaded, problem, settlement, prompt, backend=backend) / settlement.cost


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
