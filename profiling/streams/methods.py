"""Methods of attending to a long stream (StreamingLLM, Figures 3 and 10).

Shapes: Q tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiling.caches.policies import with_policy
from profiling.models.loading import LoadedModel
from profiling.quality.forced import token_losses
from profiling.streams.config import StreamMethod
from profiling.streams.tokens import TokenStream
from runtime import memory_report


@dataclass(kw_only=True)
class Stretch:
    """Figures of a method on some tokens of a stream.

    Attributes:
        nll: sum of -log p of the `tokens` that it predicted.
        seconds: for `turns`, that is tokens fed or forwards made.
        probed, right: of each token of the probes -log p, and whether it was the likeliest (1) or
            not (0).
        cache_bytes: of keys and values at the end.
        process_bytes: of the device, or of the process on the CPU.
    """

    nll: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    turns: int = 0
    probed: list[float]
    right: list[int]
    cache_bytes: int | None = None
    process_bytes: int | None = None

    def plain(self) -> dict[str, Any]:
        """For a ledger."""
        return asdict(self)


class Cached:
    """A method that feeds a stream through a cache: `with` it, then stretch after stretch."""

    def __init__(
        self, loaded: LoadedModel, method: StreamMethod, stream: TokenStream, chunk: int
    ) -> None:
        """Prepare a method.

        Args:
            chunk: tokens fed at a time, which changes nothing but the time it takes.
        """
        self._model = loaded.model
        self._chunk = chunk
        self._headwise = with_policy(loaded, method.policy)
        self._ids = torch.tensor([stream.ids], device=self._model.device, dtype=torch.long)
        self._probes = [token for span in stream.probes for token in range(*span)]
        self.cache = self._headwise.new_cache(self._model)

    def applied(self) -> AbstractContextManager[object]:
        """The method at work on the model."""
        return self._headwise.apply(self._model, strict=True)

    def feed(self, begin: int, end: int) -> Stretch:
        """Feed tokens [begin, end), those before having been fed."""
        made = Stretch(probed=[], right=[], tokens=end - begin, turns=end - begin)
        losses = []
        likeliest = []
        start = time.perf_counter()
        for at in range(begin, end, self._chunk):
            stop = min(at + self._chunk, end)
            ids = self._ids[:, at:stop]
            logits = self._model(ids, past_key_values=self.cache, use_cache=True).logits[0]
            loss, first = _losses(logits, self._ids[0, at + 1 : stop + 1])
            losses.append(loss)
            likeliest.append(first)
        # Reading the losses waits for the device.
        loss = torch.cat(losses).cpu()
        first = torch.cat(likeliest).cpu()
        made.seconds = time.perf_counter() - start
        made.nll = float(loss.double().sum())
        places = [token - begin - 1 for token in self._probes if begin < token <= end]
        made.probed = [round(value, 5) for value in loss[places].tolist()]
        made.right = [int(value) for value in first[places].tolist()]
        made.cache_bytes, made.process_bytes = (
            memory_report(self.cache).device,
            process_bytes(self._model),
        )
        return made


class Recomputed:
    """Sliding window with re-computation: a forward for each probe, positions from 0."""

    def __init__(self, loaded: LoadedModel, method: StreamMethod, stream: TokenStream) -> None:
        assert method.whole is not None
        self._model = loaded.model
        self._whole = method.whole
        self._probes = stream.probes
        self._ids = torch.tensor([stream.ids], device=self._model.device, dtype=torch.long)

    def applied(self) -> AbstractContextManager[object]:
        """Nothing: the model as it is."""
        return nullcontext()

    def feed(self, begin: int, end: int) -> Stretch:
        """Predict the probes whose last token comes after one of [begin, end)."""
        made = Stretch(probed=[], right=[])
        for first, last in self._probes:
            if not begin < last - 1 <= end:
                continue
            start = time.perf_counter()
            ids = self._ids[:, max(0, first - self._whole) : last - 1]
            logits = self._model(ids, use_cache=False, logits_to_keep=last - first).logits[0]
            loss, likeliest = (part.cpu() for part in _losses(logits, self._ids[0, first:last]))
            made.seconds += time.perf_counter() - start
            made.turns += 1
            made.tokens += last - first
            made.nll += float(loss.double().sum())
            made.probed += [round(value, 5) for value in loss.tolist()]
            made.right += [int(value) for value in likeliest.tolist()]
        made.process_bytes = process_bytes(self._model)
        return made


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute -log p of targets (Q) fp32, and if each is the likeliest (Q) bool, of (Q, V)."""
    return token_losses(logits, targets), logits.argmax(-1) == targets


def process_bytes(model: Any) -> int | None:
    """Bytes that torch holds on a GPU, or the process on the CPU; None where unknown."""
    if model.device.type == "cuda":
        return int(torch.cuda.memory_allocated(model.device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def blocks(tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of each block of a stream."""
    return ((begin, min(begin + size, tokens)) for begin in range(0, tokens, size))
