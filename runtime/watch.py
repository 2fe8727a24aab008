"""What serving looks like from inside: density, estimated recall, fallbacks and times, by layer and head.

Loaded where it is asked for only: an application that watches nothing takes no step of this module.

Shapes: B batch, S sequences, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.attention.recall import dense_where, estimate_recall
from kernels.copies import on_device
from kernels.ragged import Ragged
from runtime.attention.state import Layer

# Rows of tiles that density is counted in: all of them up to 32K tokens.
_MOST_ROWS = 512
STAGES = ("build", "attention", "estimate")


class Watch:
    """Serves prefills as ever, and keeps what it sees; sums stay on their device until somebody reads them.

    min_recall: heads whose estimated recall is lower are served densely, sequence by sequence; None leaves them.
    """

    def __init__(self, min_recall: float | None = None) -> None:
        self.min_recall = min_recall
        self._layers: dict[int, _Layer] = {}
        self._lock = threading.Lock()

    def attend(
        self,
        layer: Layer,
        kv_heads: tuple[int, ...] | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
        ragged: Ragged | None,
        backend: str,
    ) -> Tensor:
        """See runtime.attention.kernel.attend_layer."""
        plan = layer.plan
        assert plan is not None
        some, heads = (plan, range(q.shape[1])) if kv_heads is None else (plan.of(kv_heads), plan.query_heads(kv_heads))
        how: dict[str, Any] = {"scale": scale, "softcap": softcap, "backend": backend}
        clock = self._layer(layer.number).clock
        with clock.timing("build", q.device):
            index = some.build(q, k, scale=scale, ragged=ragged)
        with clock.timing("estimate", q.device):
            recall = estimate_recall(q, k, v, index, **how)
            low = torch.zeros_like(recall, dtype=torch.bool)
            if self.min_recall is not None:
                # NaN is below every bound.
                low = ~(recall >= self.min_recall)
                index = dense_where(index, low)
            density, skipped = index.density(_MOST_ROWS), index.diagonals.new_zeros(index.diagonals.shape[:2])
        with clock.timing("attention", q.device):
            out = sparse_attention(q, k, v, index, sinks=sinks, skipped=skipped, **how)
        causal = on_device(tuple(index.sequence(s).causal_tiles for s in range(index.batch)), q.device)[:, None]
        with self._lock:
            seen = (density, skipped / causal, recall, low)
            self._layer(layer.number).add(on_device(tuple(heads), q.device), len(plan.patterns), *seen)
        return out

    def read(self) -> dict[int, Seen]:
        """What was seen so far by layer, in order; waits for the devices."""
        with self._lock:
            return {number: self._layers[number].read() for number in sorted(self._layers)}

    def _layer(self, number: int) -> _Layer:
        return self._layers.setdefault(number, _Layer())


class Seen(NamedTuple):
    """What was seen of a layer: seconds by stage, and by query head of this process sums over sequences.

    sequences: how many were served. density: summed; skipped: the share of the causal tiles among it whose softmax and
    values skip-softmax left out, summed. known: of how many the recall is a number; recall: summed over
    those; lowest: the lowest of them, inf where there is none. fallbacks: how many went dense for want of recall.
    """

    seconds: dict[str, float]
    sequences: list[float]
    density: list[float]
    skipped: list[float]
    known: list[float]
    recall: list[float]
    fallbacks: list[float]
    lowest: list[float]


@dataclass(eq=False)
class _Layer:
    """Sums over sequences by head, (6, H) float64, and the lowest recall, (H,)."""

    clock: Clock = field(default_factory=lambda: Clock(STAGES))
    sums: Tensor | None = None
    lowest: Tensor | None = None

    def add(self, heads: Tensor, num_heads: int, density: Tensor, skipped: Tensor, recall: Tensor, low: Tensor) -> None:
        """Take in density, skipped tiles, recall and fallbacks, (S, h) each, of these of the layer's heads."""
        if self.sums is None or self.lowest is None:
            # In inference mode these would be tensors that cannot be written to outside of it.
            with torch.inference_mode(False):
                self.sums = torch.zeros(6, num_heads, dtype=torch.float64, device=recall.device)
                self.lowest = torch.full((num_heads,), torch.inf, device=recall.device)
        known = ~recall.isnan()
        # In the order of Seen.
        rows = torch.stack([torch.ones_like(density), density, skipped, known, recall.nan_to_num(), low])
        self.sums.index_add_(1, heads, rows.sum(1, dtype=torch.float64))
        lowest = recall.masked_fill(~known, torch.inf).amin(0)
        self.lowest.index_copy_(0, heads, torch.minimum(self.lowest.index_select(0, heads), lowest))

    def read(self) -> Seen:
        if self.sums is None or self.lowest is None:
            return Seen(self.clock.read(), [], [], [], [], [], [], [])
        sequences, density, skipped, known, recall, fallbacks = self.sums.tolist()
        return Seen(self.clock.read(), sequences, density, skipped, known, recall, fallbacks, self.lowest.tolist())


class Clock:
    """Seconds of each stage so far, in any number of threads: CUDA events where a GPU computes, else the wall clock."""

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
