"""Wall time of alternatives, interleaved so that a noisy machine is noisy for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from profiling.progress import bar


def interleaved(
    contexts: Mapping[str, Callable[[], AbstractContextManager[object]]],
    run: Callable[[], object],
    *,
    repeats: int,
    device: str,
) -> dict[str, list[float]]:
    """Time `run` in each context, `repeats` interleaved rounds after one untimed round.

    With 0 repeats there is one round, and it is timed: a rehearsal has no more to find out.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    for turn in bar(range(repeats + 1), desc="timing"):
        for name, context in contexts.items():
            with context():
                _synchronize(device)
                start = time.perf_counter()
                run()
                _synchronize(device)
                if turn or not repeats:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def in_turn(
    runs: Mapping[str, Callable[[], object]], *, repeats: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each alternative, as `interleaved` measures them."""
    current: list[Callable[[], object]] = []

    def entering(run: Callable[[], object]) -> Callable[[], nullcontext[None]]:
        def enter() -> nullcontext[None]:
            current[:] = [run]
            return nullcontext()

        return enter

    contexts = {name: entering(run) for name, run in runs.items()}
    return interleaved(contexts, lambda: current[0](), repeats=repeats, device=device)


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
