"""What attention takes on this machine with what a search chose, and all of the processor to measure it with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.patterns import LayerPlan
from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt
from profiling.speed.attention_time import attention_seconds
from search.settle import Settlement, by_head
from search.workers import is_worker

if TYPE_CHECKING:
    from search.refine import Problem

# Shares of the budget whose settlements are measured.
_SHARES = (0.5, 1.0, 2.0)
_PROMPTS = 3


def measured_seconds(
    loaded: LoadedModel, problem: Problem, settlements: Sequence[Settlement], prompts: Sequence[Prompt], *, backend: str
) -> list[float]:
    """Seconds of index builds and attention of all searched layers, of each settlement in turns: means over prompts."""
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
        found = [attention_seconds(loaded, prompt, plans, backend=backend) for prompt in prompts]
    return [fmean(seconds[name] for seconds in found) for name in plans]


def fit_to_layers(
    loaded: LoadedModel, problem: Problem, prompts: Sequence[Prompt], *, backend: str
) -> tuple[float, float]:
    """What the model's own layers make of predicted seconds: a factor, and seconds of each head whatever it computes.

    A table times layers whose heads are all alike, on made-up inputs; in real ones the indices of several kinds are
    built one after the other, which takes the same whatever their sizes. Budgets from half to twice what was asked
    for, and one for each head, are measured, and predictions are brought to the line through them.
    """
    settlements = [problem.settle({"share": share}) for share in _SHARES]
    settlements.append(by_head(problem.curves, problem.costs, problem.total))
    seconds = measured_seconds(loaded, problem, settlements, prompts, backend=backend)
    heads = int((settlements[0].chosen >= 0).sum())
    scale, overhead = line_through([settlement.cost for settlement in settlements], seconds)
    return scale, overhead / heads


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


def one_of_each_task(prompts: Sequence[Prompt], samples: int) -> list[Prompt]:
    """The first prompts of up to three tasks: what is measured on them is a mean over unlike ones, and over a while.

    prompts: of the tasks one after the other, so many `samples` each.
    """
    return list(prompts[::samples][:_PROMPTS])


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
