"""First and last tokens: rolling buffer (Mistral), StreamingLLM, DuoAttention's streaming heads.

The window's slots are a ring: token i lies in slot sinks + (i - sinks) mod window, and a new one
overwrites the oldest (Mistral 7B, section 2). With positions counted inside the cache
(StreamingLLM, section 3.2) a query stands at most sinks + window - 1 after the first sink. Tokens
of the window keep their distances, so only sinks are rotated again.

Shapes: B batch, H query heads, G KV heads, Q new tokens, s sinks, W window, D head dim, E value
dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import artifacts
from kernels.merging import with_few_keys
from runtime.caches.policy import Policy, Step, grown
from runtime.caches.rotation import Rotation


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
        self.rotation = rotation

    @classmethod
    def maker(
        cls, record: artifacts.Streaming, model: nn.Module, module: nn.Module
    ) -> Callable[[], Policy]:
        """See Policy.maker; HeadwiseError where positions cannot be counted inside the cache."""
        rotation = None
        if record.positions == "cache" and record.sinks:
            rotation = Rotation(model, module)
        return partial(cls, record.sinks, record.window, rotation)

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
        """See Policy.attend: sinks are stored before it, tokens that overwrite others after it."""
        past = self.seen
        total = past + call.length
        slots = self.sinks + self.window
        new_sinks = min(max(self.sinks - past, 0), call.length)
        self._reserve(min(total, slots), keys=call.k, values=call.v)
        if new_sinks:
            self._add_sinks(call, new_sinks)
        out = None
        if call.length > 1 or new_sinks:
            out = self._chunk(call, new_sinks)
        for begin, end, at in self._runs(max(past, self.sinks, total - self.window), total):
            self.keys[:, :, at] = call.k[:, :, begin - past : end - past]
            self.values[:, :, at] = call.v[:, :, begin - past : end - past]
        self.seen = total
        self.kept = min(total, slots)
        if total > slots:
            self.settled = total
        if out is None:
            return self._one(call)
        return out

    def size(self, needed: int) -> int:
        """See Policy.size."""
        return min(super().size(needed), self.sinks + self.window)

    def _add_sinks(self, call: Step, count: int) -> None:
        """Store the first `count` tokens of a call, which are sinks."""
        past = self.seen
        first = vars(self).get("first", call.k[:, :, :0])
        self.first = grown(first, past, self.sinks, self.sinks)
        self.first[:, :, past : past + count] = call.k[:, :, :count]
        self.keys[:, :, past : past + count] = call.k[:, :, :count]
        self.values[:, :, past : past + count] = call.v[:, :, :count]

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, slice]]:
        """Tokens begin to end of the window as runs [begin, end) in adjacent slots."""
        while begin < end:
            slot = self.sinks + (begin - self.sinks) % self.window
            stop = min(end, begin + self.sinks + self.window - slot)
            yield begin, stop, slice(slot, slot + stop - begin)
            begin = stop

    def _shift(self, token: int) -> int:
        """Positions by which a query sees the sinks nearer than they are in the text."""
        return max(0, token - (self.sinks + self.window - 1))

    def _one(self, call: Step) -> Tensor:
        """Attention of one token that is stored already; the order of slots does not matter."""
        shift = self._shift(self.seen - 1)
        if self.sinks and self.rotation is not None and shift:
            self.keys[:, :, : self.sinks] = self.rotation.shift(
                self.first, torch.tensor([shift], dtype=torch.long)
            )
        return call.attend(call.q, self.keys[:, :, : self.kept], self.values[:, :, : self.kept])[0]

    def _chunk(self, call: Step, new_sinks: int) -> Tensor:
        """Attention of a chunk of which the first `new_sinks` tokens, sinks, are stored."""
        # The oldest token of the window is out of the first query's sight.
        begin = max(self.sinks, self.seen - self.window + 1)
        past = [at for _, _, at in self._runs(begin, self.seen)]
        k = torch.cat([*(self.keys[:, :, at] for at in past), call.k[:, :, new_sinks:]], dim=2)
        v = torch.cat([*(self.values[:, :, at] for at in past), call.v[:, :, new_sinks:]], dim=2)
        if not self.sinks:
            return call.attend(call.q, k, v, window=self.window)[0]
        out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
        lse = torch.full(call.q.shape[:3], float("-inf"), device=call.q.device, dtype=torch.float32)
        if new_sinks < call.length:
            queries = call.q[:, :, new_sinks:]
            out[:, :, new_sinks:], lse[:, :, new_sinks:] = call.attend(
                queries, k, v, window=self.window
            )
        return self._with_sinks(call, out, lse)

    def _with_sinks(self, call: Step, out: Tensor, lse: Tensor) -> Tensor:
        """Merge attention over the window with that over the sinks: (B, H, Q, E)."""
        q = call.q
        sinks = min(self.sinks, self.seen + call.length)
        shifts = [self._shift(self.seen + i) for i in range(call.length)]
        if self.rotation is not None and any(shifts):
            q = self.rotation.shift(q, -torch.tensor(shifts, dtype=torch.long))
        seen = None
        if self.seen < self.sinks:
            positions = torch.arange(self.seen, self.seen + call.length, device=q.device)
            seen = torch.arange(sinks, device=q.device) <= positions[:, None]
        k = self.first[:, :, :sinks]
        v = self.values[:, :, :sinks]
        return with_few_keys(out, lse, q, k, v, seen=seen, scale=call.scale, softcap=call.softcap)
