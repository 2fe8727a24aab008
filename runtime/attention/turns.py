"""From how many new tokens on a past a layer's patterns gain: found out by the calls that are served, and kept.

An index costs as much for a few queries as for many, dense attention costs by the query: there is a number of queries
from which on patterns gain, other for each layer and length of the past. Of a call that is between the most queries
known to lose and the fewest known to gain, both ways are timed, and the faster one serves it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kernels.index import TILE, num_tiles
from kernels.patterns import LayerPlan
from runtime import measured
from runtime.dense import LEAST

# From so many queries on patterns are taken to gain: an index is little beside them.
MOST = 2048
# Patterns gain where they are faster by more than a measurement is off.
_MARGIN = 0.95
# Two ways that differ by less are timed again.
_CLEAR = 1.5
_AGAIN = 2


@dataclass
class Threshold:
    """What is known of one class of calls: the most queries with which patterns lose, the fewest with which they gain.

    Both in tiles, since kernels compute whole ones.
    """

    loses: int = 0
    gains: int = num_tiles(MOST)

    def verdict(self, q_len: int) -> bool | None:
        """Whether patterns gain with so many queries, None where nobody knows."""
        tiles = num_tiles(q_len)
        return False if tiles <= self.loses else True if tiles >= self.gains else None

    def learn(self, q_len: int, gained: bool) -> None:
        """Take in a measurement."""
        tiles = num_tiles(q_len)
        self.loses, self.gains = (min(self.loses, tiles - 1), tiles) if gained else (tiles, max(self.gains, tiles + 1))


@dataclass(eq=False)
class Turns:
    """The thresholds of one layer, by device, number formats, shapes and the power of two of the past's length."""

    plan: LayerPlan
    _known: dict[tuple[Any, ...], tuple[Path, Threshold]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def gains(self, q: Tensor, k: Tensor, q_len: int, k_len: int) -> bool | None:
        """Whether patterns gain with these of the queries and keys of a call, None where nobody knows yet."""
        if q_len == k_len or q_len >= MOST or k_len < LEAST:
            return True
        return self._of(q, k, k_len)[1].verdict(q_len)

    def measure(
        self, q: Tensor, k: Tensor, lengths: tuple[int, int], sparse: Callable[[], Tensor], dense: Callable[[], Tensor]
    ) -> Tensor | None:
        """What `sparse` gives, which serves a call by patterns; None where `dense` is the faster.

        lengths: queries and keys of each of the call's sequences, which are alike.
        """
        # Only one at a time: others would be in the way, and go on as if patterns gained.
        if not self._lock.acquire(blocking=False):
            return sparse()
        try:
            ways, out = {True: sparse, False: dense}, None
            seconds = dict.fromkeys(ways, float("inf"))
            for _ in range(1 + _AGAIN):
                for gained, run in ways.items():
                    measured.wait(q.device)
                    start = time.perf_counter()
                    done = run()
                    measured.wait(q.device)
                    out = done if gained else out
                    seconds[gained] = min(seconds[gained], time.perf_counter() - start)
                if not 1 / _CLEAR < seconds[True] / seconds[False] < _CLEAR:
                    break
            gained = seconds[True] < _MARGIN * seconds[False]
            file, threshold = self._of(q, k, lengths[1])
            threshold.learn(lengths[0], gained)
            measured.write(file, asdict(threshold))
            return out if gained else None
        finally:
            self._lock.release()

    def _of(self, q: Tensor, k: Tensor, k_len: int) -> tuple[Path, Threshold]:
        shapes = (q.shape[0], q.shape[1], k.shape[1], q.shape[3], (k_len // TILE).bit_length())
        key = (q.device, q.dtype, k.dtype, *shapes)
        if key not in self._known:
            plan = self.plan
            file = measured.file_of(q.device, "turns", *key[1:], plan.patterns, plan.dense_tail, plan.growth)
            kept = measured.read(file) or {}
            loses, gains = kept.get("loses"), kept.get("gains")
            self._known[key] = file, Threshold()
            if isinstance(loses, int) and isinstance(gains, int):
                self._known[key] = file, Threshold(loses, gains)
        return self._known[key]
