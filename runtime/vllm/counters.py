"""What a process has served: pieces of prompts by how they were served, in vLLM's metrics, and their density."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kernels.index import SparseIndex

# Counting what an index computes takes longer than building it: of so many indices of a layer one is counted.
_COUNTED = 16
SPARSE, CHOSEN, DENSE = "sparse", "chosen", "dense by kernel"
# Below vLLM's own logger, whose level and format it has.
log = logging.getLogger("vllm.headwise")


@functools.cache
def metrics() -> dict[str, Any]:
    """Counters in the registry that vLLM's /metrics shows, by section of the report."""
    from prometheus_client import Counter as Metric

    return {
        "prefills": Metric("headwise:prefills", "Prompts and chunks of prompts, by how they were served", ["served"]),
        "tokens": Metric("headwise:prefill_tokens", "Their tokens", ["served"]),
        "decode": Metric("headwise:decode", "Requests that decode by chosen tokens, once a step", ["served"]),
        "fallbacks": Metric("headwise:fallbacks", "Steps of a layer that patterns left to dense attention", ["served"]),
    }


class Counters:
    """Counts that only grow. One thread serves."""

    def __init__(self, metrics: dict[str, Any] | None = None) -> None:
        """metrics: what is counted up beside, see metrics()."""
        # By section of the report and by how.
        self._counts: Counter[tuple[str, str]] = Counter()
        self._metrics = metrics or {}
        # Tokens that a request reads in a step of decode, on average: only when somebody asks, as it waits for a GPU.
        self.read: Callable[[], float | None] = lambda: None
        self._indices: Counter[int] = Counter()
        # By device, and there until somebody asks: nothing waits for it.
        self._computed: dict[torch.device, Tensor] = {}
        self._causal = 0
        self._warned: set[str] = set()

    def step(self, pieces: Iterable[tuple[str, int]], chosen: int = 0) -> None:
        """The prompts, or chunks of some, of a new step: "sparse" or the reason why one is dense, and its tokens.

        chosen: how many requests decode by chosen tokens in it.
        """
        for how, tokens in pieces:
            self._add("prefills", how)
            self._add("tokens", how, tokens)
        if chosen:
            self._add("decode", CHOSEN, chosen)

    def index(self, layer: int, index: SparseIndex) -> None:
        """An index of one sequence was served in a layer."""
        if self._indices[layer] % _COUNTED == 0:
            tiles = index.computed_tiles().sum()
            self._computed[tiles.device] = tiles + self._computed.get(tiles.device, 0)
            self._causal += index.causal_tiles * index.num_heads * index.batch
        self._indices[layer] += 1

    def fell_back(self, reason: str, detail: str = "") -> None:
        """A layer left what a step has here to dense attention. Each reason is logged once."""
        self._add("fallbacks", reason)
        said = f"{reason}: {detail}" if detail else reason
        if said not in self._warned:
            self._warned.add(said)
            log.warning("a layer's step is served densely: %s", said)

    def report(self) -> dict[str, Any]:
        """{"prefills": {"sparse": n, reason: n}, "tokens": {the same in tokens}, "density": share or None}.

        A chunk of a prompt counts as a prefill, whatever the number of layers. Where there is a decode section,
        "decode" has {"chosen": n}: a request counts in each of its steps; "tokens_read" is how many tokens a KV head
        of a layer that is served then read, on average. "fallbacks" has {reason: n} where a layer could not serve what
        is counted there: one for each such layer and step.
        """
        found: dict[str, Any] = {"prefills": {}, "tokens": {}, "density": self._density()}
        for (section, how), count in self._counts.items():
            found.setdefault(section, {})[how] = count
        if "decode" in found:
            found["tokens_read"] = self.read()
        return found

    def _add(self, section: str, how: str, count: int = 1) -> None:
        self._counts[section, how] += count
        if section in self._metrics:
            self._metrics[section].labels(how).inc(count)

    def _density(self) -> float | None:
        """Share of the causal area that sparse layers computed, over the indices that were counted; None before."""
        return sum(map(int, self._computed.values())) / self._causal if self._causal else None
