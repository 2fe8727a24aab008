"""First and last tokens: rolling buffer (Mistral), StreamingLLM, DuoAttention's streaming heads.

The window's slots are a ring: token i lies in slot sinks + (i - sinks) mod window, and a new one
overwrites the oldest (Mistral 7B, section 2). With positions counted inside the cache
(StreamingLLM, section 3.2) a query is at most sinks + window - 1 positions after the first sink.
Tokens of the window keep their distances, so only sinks are rotated again.

Shapes: B batch, H query heads, G KV heads, Q new tokens, s sinks, W window, D head dim, E value
dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

import artifacts
from kernels.copies import on_device
from runtime.caches.paging import Paging
from runtime.caches.policy import Policy, grown, write
from runtime.caches.rotation import Rotation, rotation_of
from runtime.caches.step import Sinks, Step, View


class Window(Policy):
    """Sinks and a ring of the last tokens, the same however tokens come.

    A query sees the first `sinks` tokens and the last `window`, itself included.

    keys (B, G, s + W, D) and values (B, G, s + W, E): by slot, as the model rotated them but for
    the sinks, which are rotated to where the newest query sees them. first (B, G, s, D): the sinks'
    keys as the model rotated them.
    """

    first: Tensor

    def __init__(self, sinks: int, window: int, rotation: Rotation | None = None) -> None:
        """`rotation` counts positions inside the cache; None leaves them as they are."""
        super().__init__()
        self.sinks = sinks
        self.window = window
        self.slots = sinks + window
        self.rotation = rotation

    @classmethod
    def maker(
        cls, record: artifacts.Streaming, model: nn.Module, module: nn.Module
    ) -> Callable[[], Policy]:
        """See Policy.maker; HeadwiseError where positions cannot be counted inside the cache."""
        rotation = None
        if record.positions == "cache" and record.sinks:
            rotation = rotation_of(model, module)
        return partial(cls, record.sinks, record.window, rotation)

    @classmethod
    def paging(cls, record: artifacts.Streaming) -> Paging:
        """See Policy.paging."""
        if record.positions == "original":
            return Paging(front=record.sinks, window=record.window)
        return Paging(
            unsupported_reason=(
                f"positions is {record.positions!r}, and vLLM rotates keys before it caches them: "
                f"use 'original'"
            )
        )

    def view(self, step: Step) -> View:
        """See Policy.view: sinks are stored, and a single token; see `update` for others."""
        if step.length == 1:
            return self._one(step)
        past = self.seen[0]
        total = past + step.length
        new_sinks = min(max(self.sinks - past, 0), step.length)
        self._reserve(min(total, self.slots), keys=step.k, values=step.v)
        if new_sinks:
            self._add_sinks(step, new_sinks)
        # The oldest token of the window is out of the first query's sight.
        held = [at for _, _, at in self._runs(max(0, past - self.window + 1), past)]
        return View(
            torch.cat([*(self.keys[:, :, at] for at in held), step.k], dim=2),
            torch.cat([*(self.values[:, :, at] for at in held), step.v], dim=2),
            window=self.window,
            sinks=self._sinks(step, min(self.sinks, total)) if total > self.window else None,
        )

    def update(self, step: Step, scores: Tensor | None) -> None:
        """See Policy.update: tokens of a chunk overwrite the oldest ones."""
        if step.length == 1:
            return
        past = self.seen[0]
        total = past + step.length
        for begin, end, at in self._runs(max(past, self.sinks, total - self.window), total):
            self.keys[:, :, at] = step.k[:, :, begin - past : end - past]
            self.values[:, :, at] = step.v[:, :, begin - past : end - past]
        self._count(step.length)

    def size(self, needed: int) -> int:
        """See Policy.size."""
        return min(super().size(needed), self.slots)

    def snapshot(self) -> Self:
        """See Policy.snapshot: a token is written where the oldest was."""
        return self.select(range(len(self.seen)))

    def _count(self, length: int) -> None:
        """Count `length` more tokens of each sequence."""
        self.seen = tuple(seen + length for seen in self.seen)
        self.cached = tuple(min(seen, self.slots) for seen in self.seen)
        lengths = zip(self.seen, self.settled, strict=True)
        self.settled = tuple(seen if seen > self.slots else settled for seen, settled in lengths)

    def _one(self, step: Step) -> View:
        """Store one token of each sequence; the order of slots does not matter."""
        past = self.seen
        self._reserve(min(max(past) + 1, self.slots), keys=step.k, values=step.v)
        slots = tuple(map(self._slot, past))
        write(self.keys, step.k, slots)
        write(self.values, step.v, slots)
        if fresh := tuple(row for row, seen in enumerate(past) if seen < self.sinks):
            self._reserve_first(step.k)
            rows = on_device(fresh, step.k.device)
            places = on_device(tuple(past[row] for row in fresh), step.k.device)
            self.first[rows, :, places] = step.k[rows, :, 0]
        self._count(1)
        shifts = tuple(map(self._shift, past))
        if self.sinks and self.rotation is not None and any(shifts):
            if len(set(shifts)) == 1:
                shifts = shifts[:1]
            self.keys[:, :, : self.sinks] = self.rotation.shift(self.first, shifts)
        longest = max(self.cached)
        ends = self._ends(step.k.device)
        return View(self.keys[:, :, :longest], self.values[:, :, :longest], ends)

    def _add_sinks(self, step: Step, count: int) -> None:
        """Store the first `count` tokens of a step, which are sinks."""
        past = self.seen[0]
        self._reserve_first(step.k)
        self.first[:, :, past : past + count] = step.k[:, :, :count]
        self.keys[:, :, past : past + count] = step.k[:, :, :count]
        self.values[:, :, past : past + count] = step.v[:, :, :count]

    def _reserve_first(self, k: Tensor) -> None:
        """Reserve memory for the sinks' keys as the model rotated them."""
        first = vars(self).get("first", k[:, :, :0])
        self.first = grown(first, first.shape[2], self.sinks, self.sinks)

    def _slot(self, token: int) -> int:
        """Slot of a token of the text."""
        if token < self.sinks:
            return token
        return self.sinks + (token - self.sinks) % self.window

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """Tokens begin to end of the window as runs [begin, end) in adjacent slots."""
        while begin < end:
            slot = self._slot(begin)
            stop = min(end, begin + self.slots - slot)
            yield begin, stop, slice(slot, slot + stop - begin)
            begin = stop

    def _shift(self, token: int) -> int:
        """Positions by which a query sees the sinks nearer than they are in the text."""
        return max(0, token - (self.slots - 1))

    def _sinks(self, step: Step, count: int) -> Sinks | None:
        """The first `count` tokens as the queries of a chunk see them."""
        if not count:
            return None
        q = step.q
        past = self.seen[0]
        if self.rotation is not None and self._shift(past + step.length - 1):
            positions = torch.arange(past, past + step.length, device=q.device)
            q = self.rotation.shift(q, -(positions - (self.slots - 1)).clamp(min=0))
        k = self.first[:, :, :count]
        return Sinks(q, k, self.values[:, :, :count], past, self.window)
