"""Counters of a process for stats() and its log.

Everything is counted on the host: no count runs an operation on a device or waits for one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

SPARSE = "sparse"
# Below vLLM's own logger, whose level and format it has.
log = logging.getLogger("vllm.headwise")


class Counters:
    """Counts that only grow. One thread serves."""

    def __init__(self) -> None:
        # By section of the report and by way of serving.
        self._counts: Counter[tuple[str, str]] = Counter()
        self._tokens_read = 0
        self._prefills = 0
        # The next line on prefills is logged at this number of them.
        self._logs_at = 1
        self._warned: set[str] = set()

    @property
    def tokens_read(self) -> float | None:
        """Mean tokens that a request reads by selected tokens; None before any."""
        requests = self._counts["decode", "chosen"]
        if requests:
            return self._tokens_read / requests
        return None

    def step(self, prefills: Iterable[tuple[str, int]], reads: Sequence[int] = ()) -> None:
        """Count the requests of a step. Prefills are logged each time their number has doubled.

        Args:
            prefills: ("sparse" or the reason why it is dense, tokens) of each prefill.
            reads: tokens read by each request that decodes by selected tokens.
        """
        for served, tokens in prefills:
            self._prefills += 1
            self._counts["prefills", served] += 1
            self._counts["prefill_tokens", served] += tokens
        if reads:
            self._tokens_read += sum(reads)
            self._counts["decode", "chosen"] += len(reads)
        if self._prefills >= self._logs_at:
            self._logs_at = 2 * self._prefills
            report = self.report()
            ways = ", ".join(
                f"{count} {served} ({report['prefill_tokens'][served]} tokens)"
                for served, count in report["prefills"].items()
            )
            log.info("Headwise has served %d prefills: %s", self._prefills, ways)

    def fell_back(self, reason: str, detail: str = "") -> None:
        """Count a step that a layer left to dense attention. Each reason is logged once."""
        self._counts["fallbacks", reason] += 1
        if detail:
            line = f"{reason}: {detail}"
        else:
            line = reason
        if line not in self._warned:
            self._warned.add(line)
            log.warning("a layer's step is served densely: %s", line)

    def report(self) -> dict[str, Any]:
        """Counts by section and way of serving: {"sparse": n, reason: n}.

        The sections are prefills and prefill_tokens (a chunk of a prompt counts as one), decode
        (requests that decode by selected tokens, once a step) and fallbacks (steps of a layer that
        were left to dense attention); the last two only where something was counted.
        """
        report: dict[str, Any] = {"prefills": {}, "prefill_tokens": {}}
        for (section, served), count in self._counts.items():
            report.setdefault(section, {})[served] = count
        return report
