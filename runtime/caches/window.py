"""The first tokens and the last ones: rolling buffer (Mistral), StreamingLLM, DuoAttention's streaming heads.

The window's slots are a ring: token i lies in slot sinks + (i - sinks) mod window, and a new one overwrites the oldest
(Mistral 7B, section 2). With positions counted inside the cache (StreamingLLM, section 3.2) a query stands at most
sinks + window - 1 after the first sink. Tokens of the window keep their distances, so only sinks are rotated again.

Shapes: B batch, H query heads, G KV heads, Q new tokens, s sinks, W window, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.merging import with_few_keys
from runtime.caches.policy import Policy
from runtime.caches.room import with_room
from runtime.caches.rotation import Rotation
from runtime.caches.step import Step


class Window(Policy):
    """Sinks and a ring of the last tokens: every query sees the same whether tokens come one by one or in chunks.

    A query sees the first `sinks` tokens and the last `window`, itself included.

    keys (B, G, s + W, D) and values (B, G, s + W, E): in the slots, as the model rotated them but for the sinks, which
    stand where the newest query has to see them; first (B, G, s, D): the sinks' keys as they came.
    """

    def __init__(self, sinks: int, window: int, rotation: Rotation | None = None) -> None:
        """`rotation` counts positions inside the cache; None leaves them as they are."""
        super().__init__()
        self.sinks, self.window, self.rotation = sinks, window, rotation
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.first: Tensor | None = None

    @property
    def kept(self) -> int:
        return min(self.seen, self.sinks + self.window)

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        out = self._chunk(call) if call.length > 1 or self.seen < self.sinks else None
        self._write(call)
        if out is None:
            out = self._one(call)
        return out

    def truncate(self, length: int) -> bool:
        """See Policy.truncate."""
        if self.seen > self.sinks + self.window:
            return False
        self.seen = length
        if self.first is not None:
            self.first = self.first[:, :, :length]
        return True

    def slot(self, token: int) -> int:
        """Where a token lies, or lay before it was overwritten."""
        return token if token < self.sinks else self.sinks + (token - self.sinks) % self.window

    def _one(self, call: Step) -> Tensor:
        """Attention of one token that is in its slot already; the order of slots does not matter to it."""
        assert self.keys is not None and self.values is not None
        shift = self._shift(self.seen - 1)
        if self.sinks and self.rotation is not None and shift:
            assert self.first is not None
            self.keys[:, :, : self.sinks] = self.rotation.shift(self.first, torch.tensor([shift]))
        return call.attend(call.q, self.keys[:, :, : self.kept], self.values[:, :, : self.kept])[0]

    def _shift(self, token: int) -> int:
        """How much nearer a query sees the sinks than they are in the text."""
        return max(0, token - (self.sinks + self.window - 1))

    def _write(self, call: Step) -> None:
        """Put the call's tokens into their slots: of more than a window the last."""
        past, total, whole = self.seen, self.seen + call.length, self.sinks + self.window
        self.keys = with_room(self.keys, call.k, min(past, whole), min(total, whole), whole)
        self.values = with_room(self.values, call.v, min(past, whole), min(total, whole), whole)
        if past < self.sinks:
            sinks = call.k[:, :, : self.sinks - past]
            self.first = sinks.clone() if self.first is None else torch.cat([self.first, sinks], dim=2)
            self.keys[:, :, past : past + sinks.shape[2]] = sinks
            self.values[:, :, past : past + sinks.shape[2]] = call.v[:, :, : sinks.shape[2]]
        begin = max(past, self.sinks, total - self.window)
        while begin < total:
            # As many as lie side by side.
            slot = self.slot(begin)
            end = min(total, begin + whole - slot)
            for held, new in ((self.keys, call.k), (self.values, call.v)):
                held[:, :, slot : slot + end - begin] = new[:, :, begin - past : end - past]
            begin = end
        self.seen = total

    def _chunk(self, call: Step) -> Tensor:
        """Attention of a chunk that is not in its slots yet."""
        ahead = min(max(self.sinks - self.seen, 0), call.length)
        past_k, past_v = self._past()
        k = torch.cat([*past_k, call.k[:, :, ahead:]], dim=2)
        v = torch.cat([*past_v, call.v[:, :, ahead:]], dim=2)
        if not self.sinks:
            return call.attend(call.q, k, v, window=self.window)[0]
        out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
        lse = torch.full(call.q.shape[:3], float("-inf"), device=call.q.device)
        if ahead < call.length:
            out[:, :, ahead:], lse[:, :, ahead:] = call.attend(call.q[:, :, ahead:], k, v, window=self.window)
        return self._with_sinks(call, ahead, out, lse)

    def _past(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the window before a chunk, oldest first, without the one that its first query misses."""
        begin = max(self.sinks, self.seen - self.window + 1)
        if self.keys is None or self.values is None or begin >= self.seen:
            return [], []
        slot, end = self.slot(begin), self.slot(self.seen - 1) + 1
        places = [slice(slot, end)] if slot < end else [slice(slot, self.kept), slice(self.sinks, end)]
        return [self.keys[:, :, at] for at in places], [self.values[:, :, at] for at in places]

    def _with_sinks(self, call: Step, ahead: int, out: Tensor, lse: Tensor) -> Tensor:
        """(B, H, Q, E): attention over the window merged with that over the sinks, seen from each query's place."""
        held = (
            []
            if self.first is None or self.values is None
            else [(self.first, self.values[:, :, : self.first.shape[2]])]
        )
        new = [(call.k[:, :, :ahead], call.v[:, :, :ahead])] if ahead else []
        k, v = (torch.cat(parts, dim=2) for parts in zip(*held, *new, strict=True))
        q, seen = call.q, None
        shifts = [self._shift(self.seen + i) for i in range(call.length)]
        if self.rotation is not None and any(shifts):
            q = self.rotation.shift(q, -torch.tensor(shifts))
        if self.seen < self.sinks:
            tokens = torch.arange(self.seen, self.seen + call.length, device=q.device)
            seen = torch.arange(k.shape[2], device=q.device) <= tokens[:, None]
        return with_few_keys(out, lse, q, k, v, seen=seen, scale=call.scale, softcap=call.softcap)
