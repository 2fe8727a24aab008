"""What serving looks like from inside: density, estimated recall, fallbacks and times, by layer and head.

Loaded where it is asked for only: an application that watches nothing takes no step of this module.

Shapes: B batch, S sequences, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
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
_STAGES = ("build", "attention", "estimate")


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
        sinks: Tensor | None,
        ragged: Ragged | None,
        **how: Any,
    ) -> Tensor:
        """See runtime.attention.kernel.attend_layer; how: scale, softcap and backend."""
        plan = layer.plan
        assert plan is not None
        some, heads = (plan, range(q.shape[1])) if kv_heads is None else (plan.of(kv_heads), plan.query_heads(kv_heads))
        with self._lock:
            if layer.number not in self._layers:
                self._layers[layer.number] = _Layer(len(plan.patterns), q.device)
            seen = self._layers[layer.number]
        clock = seen.clock
        with clock.timing("build", q.device):
            index = some.build(q, k, scale=how["scale"], ragged=ragged)
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
            seen.add(on_device(tuple(heads), q.device), density, skipped / causal, recall, low)
        return out

    def read(self) -> dict[int, Seen]:
        """What was seen so far by layer, in order; waits for the devices."""
        with self._lock:
            return {number: self._layers[number].read() for number in sorted(self._layers)}


class Head(NamedTuple):
    """What was seen of a query head, summed over sequences.

    sequences: how many were served. skipped: the share of the causal tiles within the density whose softmax and values
    skip-softmax left out. known: of how many the recall is a number, which `recall` is summed over; lowest: the lowest
    of them, inf where there is none. fallbacks: how many went dense for want of recall.
    """

    sequences: float
    density: float
    skipped: float
    known: float
    recall: float
    fallbacks: float
    lowest: float


class Seen(NamedTuple):
    """What was seen of a layer: seconds by stage, and its query heads in this process."""

    seconds: dict[str, float]
    heads: list[Head]


class _Layer:
    """Sums over sequences by head, (H, 6) float64 in the order of Head, and the lowest recall, (H,)."""

    def __init__(self, num_heads: int, device: torch.device) -> None:
        self.clock = _Clock()
        # In inference mode these would be tensors that cannot be written to outside of it.
        with torch.inference_mode(False):
            self._sums = torch.zeros(num_heads, 6, dtype=torch.float64, device=device)
            self._lowest = torch.full((num_heads,), torch.inf, device=device)

    def add(self, heads: Tensor, density: Tensor, skipped: Tensor, recall: Tensor, low: Tensor) -> None:
        """Take in density, skipped tiles, recall and fallbacks, (S, h) each, of these of the layer's heads."""
        known = ~recall.isnan()
        rows = torch.stack([torch.ones_like(density), density, skipped, known, recall.nan_to_num(), low], -1)
        self._sums.index_add_(0, heads, rows.sum(0, dtype=torch.float64))
        lowest = recall.masked_fill(~known, torch.inf).amin(0)
        self._lowest.index_copy_(0, heads, torch.minimum(self._lowest.index_select(0, heads), lowest))

    def read(self) -> Seen:
        sums = zip(self._sums.tolist(), self._lowest.tolist(), strict=True)
        return Seen(self.clock.read(), [Head._make([*row, low]) for row, low in sums])


class _Clock:
    """Seconds of each stage so far, in any number of threads: CUDA events where a GPU computes, else the wall clock."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(_STAGES, 0.0)
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def timing(self, stage: str, device: torch.device) -> Iterator[None]:
        """Time what is inside; on a GPU what it has launched, in the current stream. Nothing counts if it fails."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            took = time.perf_counter() - start
            with self._lock:
                self._seconds[stage] += took
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

    def _collect(self, *, wait: bool = False) -> None:
        """Take in the events that have passed: held back, they would pile up."""
        with self._lock:
            while self._open and (wait or self._open[0][2].query()):
                stage, begin, end = self._open.popleft()
                if wait:
                    end.synchronize()
                self._seconds[stage] += begin.elapsed_time(end) / 1000
