"""Counters of a process for stats() and for vLLM's metrics."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from kernels.index import SparseIndex

# Counting the tiles of an index takes longer than building it: one of so many is counted.
_COUNTED = 16
SPARSE = "sparse"
# Below vLLM's own logger, whose level and format it has.
log = logging.getLogger("vllm.headwise")
# By section of the report.
_METRICS = {
    "prefills": "Prompts and chunks of prompts, by how they were served",
    "prefill_tokens": "Tokens of prompts, by how they were served",
    "decode": "Requests that decode by chosen tokens, once a step",
    "fallbacks": "Steps of a layer that were left to dense attention, by reason",
}


@functools.cache
def metrics() -> dict[str, Any]:
    """Counters in the registry that vLLM's /metrics shows, by section of the report."""
    from prometheus_client import Counter as Metric

    return {name: Metric(f"headwise:{name}", says, ["served"]) for name, says in _METRICS.items()}


class Counters:
    """Counts that only grow. One thread serves."""

    def __init__(self, metrics: dict[str, Any] | None = None) -> None:
        # By section of the report and by what is counted there; metrics has the same.
        self._counts: Counter[tuple[str, str]] = Counter()
        self._metrics = metrics or {}
        self._indices: Counter[int] = Counter()
        # Tiles that were computed, on their device until report(), and those of the causal area.
        self._computed: Tensor | int = 0
        self._causal = 0
        self._warned: set[str] = set()

    def step(self, prefills: Iterable[tuple[str, int]], chosen: int) -> None:
        """Count prefills, ("sparse" or why one is dense, tokens), and decode by chosen tokens."""
        for served, tokens in prefills:
            self._add("prefills", served)
            self._add("prefill_tokens", served, tokens)
        if chosen:
            self._add("decode", "chosen", chosen)

    def index(self, layer: int, index: SparseIndex) -> None:
        """Count an index of one sequence that was served in a layer."""
        if self._indices[layer] % _COUNTED == 0:
            self._computed = index.computed_tiles().sum() + self._computed
            self._causal += index.causal_tiles * index.num_heads * index.batch
        self._indices[layer] += 1

    def fell_back(self, reason: str, detail: str = "") -> None:
        """Count a step that a layer left to dense attention. Each reason is logged once."""
        self._add("fallbacks", reason)
        if detail:
            line = f"{reason}: {detail}"
        else:
            line = reason
        if line not in self._warned:
            self._warned.add(line)
            log.warning("a layer's step is served densely: %s", line)

    def report(self) -> dict[str, Any]:
        """Counts by section (_METRICS) and way of serving: {"sparse": n, reason: n}.

        density: fraction of the causal area that sparse layers computed, None before any.
        """
        density = None
        if self._causal:
            density = int(self._computed) / self._causal
        report: dict[str, Any] = {"prefills": {}, "prefill_tokens": {}, "density": density}
        for (section, served), count in self._counts.items():
            report.setdefault(section, {})[served] = count
        return report

    def _add(self, section: str, served: str, count: int = 1) -> None:
        self._counts[section, served] += count
        if section in self._metrics:
            self._metrics[section].labels(served).inc(count)
