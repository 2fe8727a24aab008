"""Adds up the time of stages: CUDA events where a GPU computes, so that nothing waits, the wall clock elsewhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Seconds of each stage so far, in any number of threads."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._seconds = dict.fromkeys(stages, 0.0)
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def timing(self, stage: str, device: torch.device) -> Iterator[None]:
        """Time what is inside; on a GPU what it has launched, in the current stream. Nothing counts if it fails."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._add(stage, time.perf_counter() - start)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        yield
        end.record(stream)
        with self._lock:
            self._open.append((stage, begin, end))
        self._collect()

    def read(self) -> dict[str, float]:
        """Seconds by stage; waits for what still runs on a GPU."""
        self._collect(wait=True)
        with self._lock:
            return dict(self._seconds)

    def _add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self._seconds[stage] += seconds

    def _collect(self, *, wait: bool = False) -> None:
        """Take in the events that have passed: held back, they would pile up."""
        with self._lock:
            while self._open and (wait or self._open[0][2].query()):
                stage, begin, end = self._open.popleft()
                if wait:
                    end.synchronize()
                self._seconds[stage] += begin.elapsed_time(end) / 1000
