"""What a process has served: pieces of prompts by how they were served, and their density."""

from __future__ import annotations

import json
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


class Counters:
    """Counts of whole steps only grow. One thread serves."""

    def __init__(self, file: Path | None = None) -> None:
        """With `file`, the folder it is in is made, and the report is kept there."""
        self.pieces: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        # Tokens of the latest step's pieces that are to be served sparsely.
        self._sparse: list[int] = []
        # Requests that decode by chosen tokens, in all steps, and in the latest.
        self.decodes: Counter[str] = Counter()
        self._chosen = 0
        # Tokens that such a request reads in a step, on average: asked when somebody asks, since that waits for a GPU.
        self.read: Callable[[], float | None] = lambda: None
        self._indices: Counter[int] = Counter()
        # Indices of all steps before the latest, and whether dense attention was faster in that.
        self._before, self._any_slower = 0, False
        # By device, and there until somebody asks: nothing waits for it.
        self._computed: dict[torch.device, Tensor] = {}
        self._causal = 0
        self._file = file
        self._logged = self._written = time.monotonic()
        self._said = 0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._write()

    def step(self, pieces: Iterable[tuple[str, int]], chosen: int = 0) -> None:
        """The prompts, or chunks of some, of a new step: "sparse" or the reason why one is dense, and its tokens.

        chosen: how many requests decode by chosen tokens in it.
        """
        self._settle()
        self._sparse, self._chosen = [], chosen
        self.decodes[CHOSEN] += chosen
        for how, tokens in pieces:
            self._add(how, tokens)
            if how == SPARSE:
                self._sparse.append(tokens)

    def fell_back(self, reason: str) -> None:
        """A layer left what the step has here to dense attention: all of it counts as dense, by the first reason."""
        self._left(reason)
        if self._chosen:
            self.decodes[CHOSEN] -= self._chosen
            self.decodes[reason] += self._chosen
        self._chosen = 0

    def slower(self) -> None:
        """In a layer dense attention serves a prefill of the step, since it is the faster there."""
        self._any_slower = True

    def _settle(self) -> None:
        """Of the latest step: what dense attention serves in every layer counts as dense."""
        if self._any_slower and self._indices.total() == self._before:
            self._left("dense attention is faster")
        self._any_slower, self._before = False, self._indices.total()

    def _left(self, reason: str) -> None:
        for tokens in self._sparse:
            self._add(SPARSE, -tokens, -1)
            self._add(reason, tokens)
        self._sparse = []

    def _add(self, how: str, tokens: int, pieces: int = 1) -> None:
        self.pieces[how] += pieces
        self.tokens[how] += tokens

    def index(self, layer: int, index: SparseIndex) -> None:
        """An index of one sequence was served in a layer."""
        if self._indices[layer] % _COUNTED == 0:
            tiles = index.computed_tiles().sum()
            self._computed[tiles.device] = tiles + self._computed.get(tiles.device, 0)
            self._causal += index.causal_tiles * index.num_heads * index.batch
        self._indices[layer] += 1

    @property
    def density(self) -> float | None:
        """Share of the causal area that sparse layers computed, over the indices that were counted; None before."""
        return sum(map(int, self._computed.values())) / self._causal if self._causal else None

    def report(self) -> dict[str, Any]:
        """{"prefills": {"sparse": n, reason: n}, "tokens": {the same in tokens}, "density": share or None}.

        A chunk of a prompt counts as a prefill, whatever the number of layers. Where there is a decode section,
        "decode" has {"chosen": n, reason: n}: a request counts in each of its steps; "tokens_read" is how many tokens
        a KV head of a layer that is served then read, on average.
        """
        self._settle()
        report = {"prefills": dict(+self.pieces), "tokens": dict(+self.tokens), "density": self.density}
        return report | {"decode": dict(+self.decodes), "tokens_read": self.read()} if +self.decodes else report

    def line(self) -> str | None:
        """What to say in the log, None where nothing is new or the last line is too recent."""
        now, total = time.monotonic(), self.pieces.total() + self.decodes.total()
        if total == self._said or now - self._logged < _LOGGED:
            return None
        self._logged, self._said = now, total
        density = "" if self.density is None else f"; density of the sparse layers {self.density:.2f}"
        line = f"prefills so far: {_told(self.pieces)}{density}"
        if not +self.decodes:
            return line
        read = self.read()
        return f"{line}; decode: {_told(self.decodes)}{'' if read is None else f', {read:.0f} tokens read each'}"

    def keep(self) -> None:
        """Bring the file up to date, if there is one and it is old enough."""
        if self._file is not None and time.monotonic() - self._written >= _WRITTEN:
            self._write()

    def close(self) -> None:
        """Bring the file up to date, however old it is."""
        if self._file is not None:
            self._write()

    def _write(self) -> None:
        assert self._file is not None
        self._written = time.monotonic()
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        new.write_text(json.dumps(self.report()) + "\n")
        os.replace(new, self._file)


def _told(counts: Counter[str]) -> str:
    """12 sparse, 3 short: the most first."""
    return ", ".join(f"{count} {how}" for how, count in sorted((+counts).items(), key=lambda pair: -pair[1])) or "none"
