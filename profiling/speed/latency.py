"""Wall time of alternatives, interleaved so that a noisy machine is noisy for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from profiling.progress import bar


def time_calls(
    runs: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    device: str,
    contexts: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
    warm_up: bool = True,
    quiet: bool = False,
) -> dict[str, list[float]]:
    """Time each alternative, `repeats` interleaved rounds after one untimed round, if any.

    With 0 repeats there is one round, and it is timed: a rehearsal has no more to find out.

    Args:
        runs: the alternatives by name.
        repeats: timed rounds.
        device: is synchronized before each reading of the clock.
        contexts: that each alternative runs in; to enter and to leave one is not timed.
        warm_up: run one untimed round first.
        quiet: without a progress bar.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    first = -1 if warm_up and repeats else 0
    rounds = range(first, max(repeats, 1))
    for number in rounds if quiet else bar(rounds, desc="timing"):
        for name, run in runs.items():
            with contexts[name]() if contexts else nullcontext():
                taken = _seconds(run, device)
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def _seconds(run: Callable[[], object], device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each alternative."""
    return {name: statistics.median(values) for name, values in seconds.items()}


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor) -> None:
    """Prefill as serving does: the cache is filled, only the last logits are computed."""
    model(input_ids=ids, use_cache=True, logits_to_keep=1)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
