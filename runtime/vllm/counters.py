"""What a process has served: pieces of prompts by how they were served, and their density; to a log and to a file."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.index import SparseIndex

# Counting what an index computes takes longer than building it: of so many indices of a layer one is counted.
_COUNTED = 16
SPARSE, CHOSEN, DENSE = "sparse", "chosen", "dense by kernel"
# Seconds between two lines in the log, or two states of the file.
_LOGGED, _WRITTEN = 10.0, 1.0
# Below vLLM's own logger, whose level and format it has.
log = logging.getLogger("vllm.headwise")


class Counters:
    """Counts of whole steps only grow. One thread serves."""

    def __init__(self, file: Path | None = None) -> None:
        """With `file`, the folder it is in is made, and the report is kept there."""
        # By section of the report and by how: all steps before the latest, and that one as it was meant to be served.
        self._before: Counter[tuple[str, str]] = Counter()
        self._latest: Counter[tuple[str, str]] = Counter()
        # Why that fell back.
        self._why: str | None = None
        # Tokens that a request reads in a step of decode, on average: only when somebody asks, as it waits for a GPU.
        self.read: Callable[[], float | None] = lambda: None
        self._indices: Counter[int] = Counter()
        # By device, and there until somebody asks: nothing waits for it.
        self._computed: dict[torch.device, Tensor] = {}
        self._causal = 0
        self._warned: set[str] = set()
        self._file = file
        self._logged, self._in_log = time.monotonic(), 0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def step(self, pieces: Iterable[tuple[str, int]], chosen: int = 0) -> None:
        """The prompts, or chunks of some, of a new step: "sparse" or the reason why one is dense, and its tokens.

        chosen: how many requests decode by chosen tokens in it.
        """
        self._before = self._so_far()
        self._why = None
        self._latest = Counter({("decode", CHOSEN): chosen})
        for how, tokens in pieces:
            self._latest["prefills", how] += 1
            self._latest["tokens", how] += tokens

    def index(self, layer: int, index: SparseIndex) -> None:
        """An index of one sequence was served in a layer."""
        if self._indices[layer] % _COUNTED == 0:
            tiles = index.computed_tiles().sum()
            self._computed[tiles.device] = tiles + self._computed.get(tiles.device, 0)
            self._causal += index.causal_tiles * index.num_heads * index.batch
        self._indices[layer] += 1

    def fell_back(self, reason: str, detail: str = "") -> None:
        """A layer left what the step has here to dense attention: all of it counts as dense, by the first reason.

        Each is said once.
        """
        self._why = self._why or reason
        said = f"{reason}: {detail}" if detail else reason
        if said not in self._warned:
            self._warned.add(said)
            log.warning("a prefill is served densely: %s", said)

    def report(self) -> dict[str, Any]:
        """{"prefills": {"sparse": n, reason: n}, "tokens": {the same in tokens}, "density": share or None}.

        A chunk of a prompt counts as a prefill, whatever the number of layers. Where there is a decode section,
        "decode" has {"chosen": n, reason: n}: a request counts in each of its steps; "tokens_read" is how many tokens
        a KV head of a layer that is served then read, on average.
        """
        found: dict[str, Any] = {"prefills": {}, "tokens": {}, "density": self._density()}
        for (section, how), count in self._so_far().items():
            if count:
                found.setdefault(section, {})[how] = count
        return found | {"tokens_read": self.read()} if "decode" in found else found

    def line(self) -> str | None:
        """What to say in the log, None where nothing is new or the last line is too recent."""
        now, total = time.monotonic(), (self._before + self._latest).total()
        if total == self._in_log or now - self._logged < _LOGGED:
            return None
        self._logged, self._in_log = now, total
        report = self.report()
        density = "" if report["density"] is None else f"; density of the sparse layers {report['density']:.2f}"
        line = f"prefills so far: {_told(report['prefills'])}{density}"
        if "decode" not in report:
            return line
        read = "" if report["tokens_read"] is None else f", {report['tokens_read']:.0f} tokens read each"
        return f"{line}; decode: {_told(report['decode'])}{read}"

    def tell(self) -> None:
        """Now and then: what was served so far, to the log and to the file."""
        if (line := self.line()) is not None:
            log.info("Headwise: %s", line)
        if time.monotonic() - self._written >= _WRITTEN:
            self.write()

    def write(self) -> None:
        """Bring the file up to date, if there is one."""
        self._written = time.monotonic()
        if self._file is not None:
            new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
            new.write_text(json.dumps(self.report()) + "\n")
            os.replace(new, self._file)

    def _so_far(self) -> Counter[tuple[str, str]]:
        """All steps, the latest as it was served in the end."""
        instead = {}
        if self._why is not None:
            instead = {SPARSE: self._why, CHOSEN: self._why}
        found = self._before.copy()
        for (section, how), count in self._latest.items():
            found[section, instead.get(how, how)] += count
        return found

    def _density(self) -> float | None:
        """Share of the causal area that sparse layers computed, over the indices that were counted; None before."""
        return sum(map(int, self._computed.values())) / self._causal if self._causal else None


def _told(counts: dict[str, int]) -> str:
    """12 sparse, 3 short: the most first."""
    return ", ".join(f"{count} {how}" for how, count in sorted(counts.items(), key=lambda pair: -pair[1])) or "none"
