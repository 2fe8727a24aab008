"""Counters of a process for stats() and for vLLM's metrics.

Everything is counted on the host: no count runs an operation on a device or waits for one.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.attention.state import message

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
        self._tokens_read = 0
        self._warned: set[str] = set()

    @property
    def tokens_read(self) -> float | None:
        """Mean tokens that a request reads by chosen tokens; None before any."""
        requests = self._counts["decode", "chosen"]
        if requests:
            return self._tokens_read / requests
        return None

    def step(self, prefills: Iterable[tuple[str, int]], reads: Sequence[int] = ()) -> None:
        """Count the requests of a step.

        Args:
            prefills: ("sparse" or the reason why it is dense, tokens) of each prefill.
            reads: tokens that each request reads which decodes by chosen tokens.
        """
        for served, tokens in prefills:
            self._add("prefills", served)
            self._add("prefill_tokens", served, tokens)
        if reads:
            self._tokens_read += sum(reads)
            self._add("decode", "chosen", len(reads))

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
        """Counts by section (_METRICS) and way of serving: {"sparse": n, reason: n}."""
        report: dict[str, Any] = {"prefills": {}, "prefill_tokens": {}}
        for (section, served), count in self._counts.items():
            report.setdefault(section, {})[served] = count
        return report

    def _add(self, section: str, served: str, count: int = 1) -> None:
        self._counts[section, served] += count
        if section not in self._metrics:
            return
        try:
            self._metrics[section].labels(served).inc(count)
        except Exception as error:
            # Prometheus writes files in PROMETHEUS_MULTIPROC_DIR. No metric ends the engine.
            self._metrics = {}
            log.warning("Headwise's counters in /metrics stop: %s", message(error))
