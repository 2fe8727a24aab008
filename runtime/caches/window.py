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
from kernels.merge import merge_attention
from runtime.caches.policy import Policy, Step, grown, write
from runtime.caches.rotation import Rotation, rotation_of


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
    def why_not_in_vllm(cls, record: artifacts.Streaming) -> str | None:
        """See Policy.why_not_in_vllm."""
        if record.positions == "original":
            return None
        return (
            f"positions is {record.positions!r}, and vLLM rotates keys "
            f"before it caches them: use 'original'"
        )

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend: sinks are stored before it, tokens that overwrite others after it."""
        if call.length == 1:
            return self._one(call)
        past = self.seen[0]
        total = past + call.length
        new_sinks = min(max(self.sinks - past, 0), call.length)
        self._reserve(min(total, self.slots), keys=call.k, values=call.v)
        if new_sinks:
            self._add_sinks(call, new_sinks)
        out = self._chunk(call, new_sinks)
        for begin, end, at in self._runs(max(past, self.sinks, total - self.window), total):
            self.keys[:, :, at] = call.k[:, :, begin - past : end - past]
            self.values[:, :, at] = call.v[:, :, begin - past : end - past]
        self._count(call.length)
        return out

    def size(self, needed: int) -> int:
        """See Policy.size."""
        return min(super().size(needed), self.slots)

    def snapshot(self) -> Self:
        """See Policy.snapshot: a token is written where the oldest was."""
        return self.select(range(len(self.seen)))

    def _count(self, length: int) -> None:
        """Count `length` more tokens of each sequence."""
        self.seen = tuple(seen + length for seen in self.seen)
        self.kept = tuple(min(seen, self.slots) for seen in self.seen)
        lengths = zip(self.seen, self.settled, strict=True)
        self.settled = tuple(seen if seen > self.slots else settled for seen, settled in lengths)

    def _one(self, call: Step) -> Tensor:
        """Store one token of each sequence and attend; the order of slots does not matter."""
        past = self.seen
        self._reserve(min(max(past) + 1, self.slots), keys=call.k, values=call.v)
        slots = tuple(map(self._slot, past))
        write(self.keys, call.k, slots)
        write(self.values, call.v, slots)
        if fresh := tuple(row for row, seen in enumerate(past) if seen < self.sinks):
            self._reserve_first(call.k)
            rows = on_device(fresh, call.k.device)
            places = on_device(tuple(past[row] for row in fresh), call.k.device)
            self.first[rows, :, places] = call.k[rows, :, 0]
        self._count(1)
        shifts = tuple(map(self._shift, past))
        if self.sinks and self.rotation is not None and any(shifts):
            if len(set(shifts)) == 1:
                shifts = shifts[:1]
            self.keys[:, :, : self.sinks] = self.rotation.shift(self.first, shifts)
        longest = max(self.kept)
        return call.attend(
            call.q,
            self.keys[:, :, :longest],
            self.values[:, :, :longest],
            ends=self._ends(call.k.device),
        )[0]

    def _add_sinks(self, call: Step, count: int) -> None:
        """Store the first `count` tokens of a call, which are sinks."""
        past = self.seen[0]
        self._reserve_first(call.k)
        self.first[:, :, past : past + count] = call.k[:, :, :count]
        self.keys[:, :, past : past + count] = call.k[:, :, :count]
        self.values[:, :, past : past + count] = call.v[:, :, :count]

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

    def _chunk(self, call: Step, new_sinks: int) -> Tensor:
        """Attention of a chunk of which the first `new_sinks` tokens, sinks, are stored."""
        # The oldest token of the window is out of the first query's sight.
        seen = self.seen[0]
        begin = max(self.sinks, seen - self.window + 1)
        past = [at for _, _, at in self._runs(begin, seen)]
        k = torch.cat([*(self.keys[:, :, at] for at in past), call.k[:, :, new_sinks:]], dim=2)
        v = torch.cat([*(self.values[:, :, at] for at in past), call.v[:, :, new_sinks:]], dim=2)
        if not self.sinks:
            return call.attend(call.q, k, v, window=self.window)[0]
        out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
        lse = torch.full(call.q.shape[:3], float("-inf"), dtype=torch.float32, device=call.q.device)
        if new_sinks < call.length:
            queries = call.q[:, :, new_sinks:]
            out[:, :, new_sinks:], lse[:, :, new_sinks:] = call.attend(
                queries, k, v, window=self.window
            )
        return self._with_sinks(call, out, lse)

    def _with_sinks(self, call: Step, out: Tensor, lse: Tensor) -> Tensor:
        """Merge attention over the window with that over the sinks: (B, H, Q, E)."""
        q = call.q
        past = self.seen[0]
        sinks = min(self.sinks, past + call.length)
        positions = torch.arange(past, past + call.length, device=q.device)
        if self.rotation is not None and self._shift(past + call.length - 1):
            shifts = (positions - (self.slots - 1)).clamp(min=0)
            q = self.rotation.shift(q, -shifts)
        seen = None
        if past < self.sinks:
            seen = torch.arange(sinks, device=q.device) <= positions[:, None]
        k = self.first[:, :, :sinks]
        v = self.values[:, :, :sinks]
        return merge_attention(out, lse, q, k, v, seen=seen, scale=call.scale, softcap=call.softcap)
