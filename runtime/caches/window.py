"""The first tokens and the last ones: rolling buffer (Mistral), StreamingLLM, DuoAttention's
streaming heads.

The window's slots are a ring: token i lies in slot sinks + (i - sinks) mod window, and a new one
overwrites the oldest (Mistral 7B, section 2). With positions counted inside the cache
(StreamingLLM, section 3.2) a query stands at most sinks + window - 1 after the first sink. Tokens
of the window keep their distances, so only sinks are rotated again.

Shapes: B batch, H query heads, G KV heads, Q new tokens, s sinks, W window, D head dim, E value
dim."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import artifacts
from kernels.merging import with_few_keys
from runtime.caches.policy import Policy
from runtime.caches.room import with_room
from runtime.caches.rotation import Rotation
from runtime.caches.step import Step


class Window(Policy):
    """Sinks and a ring of the last tokens: every query sees the same whether tokens come one by one
    or in chunks.

    A query sees the first `sinks` tokens and the last `window`, itself included.

    keys (B, G, s + W, D) and values (B, G, s + W, E): in the slots, as the model rotated them but
    for the sinks, which stand where the newest query has to see them; first (B, G, s, D): the
    sinks' keys as they came."""

    first: Tensor

    def __init__(self, sinks: int, window: int, rotation: Rotation | None = None) -> None:
        """`rotation` counts positions inside the cache; None leaves them as they are."""
        super().__init__()
        self.sinks = sinks
        self.window = window
        self.rotation = rotation

    @classmethod
    def why_not_in_vllm(cls, record: artifacts.Streaming) -> str | None:
        """See Policy.why_not_in_vllm."""
        if record.positions == "original":
            return None
        return (
            f"positions is {record.positions!r}, and vLLM rotates keys "
            f"before they are kept: use 'original'"
        )

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend: sinks are put into their slots before it, what overwrites others after
        it."""
        past = self.seen
        total = self.seen + call.length
        slots = self.sinks + self.window
        ahead = min(max(self.sinks - past, 0), call.length)
        self._make_room(min(total, slots), keys=call.k, values=call.v)
        if ahead:
            self.first = with_room(
                vars(self).get("first", call.k[:, :, :0]), past, self.sinks, self.sinks
            )
            for held, new in ((self.first, call.k), (self.keys, call.k), (self.values, call.v)):
                held[:, :, past : past + ahead] = new[:, :, :ahead]
        out = self._chunk(call, ahead) if call.length > 1 or ahead else None
        for begin, end, at in self._runs(max(past, self.sinks, total - self.window), total):
            self.keys[:, :, at] = call.k[:, :, begin - past : end - past]
            self.values[:, :, at] = call.v[:, :, begin - past : end - past]
        self.seen, self.kept = total, min(total, slots)
        if total > slots:
            self.settled = total
        return self._one(call) if out is None else out

    def room(self, needed: int) -> int:
        """See Policy.room."""
        return min(super().room(needed), self.sinks + self.window)

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """Tokens of the window in runs [begin, end) that lie side by side, and in which slots."""
        while begin < end:
            slot = self.sinks + (begin - self.sinks) % self.window
            stop = min(end, begin + self.sinks + self.window - slot)
            yield begin, stop, slice(slot, slot + stop - begin)
            begin = stop

    def _shift(self, token: int) -> int:
        """How much nearer a query sees the sinks than they are in the text."""
        return max(0, token - (self.sinks + self.window - 1))

    def _one(self, call: Step) -> Tensor:
        """Attention of one token that is in its slot already; the order of slots does not matter to
        it."""
        shift = self._shift(self.seen - 1)
        if self.sinks and self.rotation is not None and shift:
            self.keys[:, :, : self.sinks] = self.rotation.shift(self.first, torch.tensor([shift]))
        return call.attend(call.q, self.keys[:, :, : self.kept], self.values[:, :, : self.kept])[0]

    def _chunk(self, call: Step, ahead: int) -> Tensor:
        """Attention of a chunk whose first `ahead` tokens are sinks and in their slots, and others
        are not."""
        # Without the one that its first query misses.
        before = [
            at for _, _, at in self._runs(max(self.sinks, self.seen - self.window + 1), self.seen)
        ]
        k, v = (
            torch.cat([*(held[:, :, at] for at in before), new[:, :, ahead:]], dim=2)
            for held, new in ((self.keys, call.k), (self.values, call.v))
        )
        if not self.sinks:
            return call.attend(call.q, k, v, window=self.window)[0]
        out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
        lse = torch.full(call.q.shape[:3], float("-inf"), device=call.q.device)
        if ahead < call.length:
            out[:, :, ahead:], lse[:, :, ahead:] = call.attend(
                call.q[:, :, ahead:], k, v, window=self.window
            )
        return self._with_sinks(call, min(self.sinks, self.seen + call.length), out, lse)

    def _with_sinks(self, call: Step, sinks: int, out: Tensor, lse: Tensor) -> Tensor:
        """(B, H, Q, E): attention over the window merged with that over the sinks, seen from each
        query's place."""
        q = call.q
        seen = None
        shifts = [self._shift(self.seen + i) for i in range(call.length)]
        if self.rotation is not None and any(shifts):
            q = self.rotation.shift(q, -torch.tensor(shifts))
        if self.seen < self.sinks:
            tokens = torch.arange(self.seen, self.seen + call.length, device=q.device)
            seen = torch.arange(sinks, device=q.device) <= tokens[:, None]
        k = self.first[:, :, :sinks]
        v = self.values[:, :, :sinks]
        return with_few_keys(out, lse, q, k, v, seen=seen, scale=call.scale, softcap=call.softcap)
