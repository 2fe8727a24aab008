"""SnapKV: of a prompt what its last queries attend to, and all that is generated (Li et al. 2024, section 4).

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, W window, D head dim, E value dim.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor

import artifacts
from kernels.scored import scored_attention
from runtime.caches.policy import Policy, Step, tokens
from runtime.caches.room import with_room


class SnapKV(Policy):
    """Tokens that a prompt's last `window` queries vote for, those queries' own, and every token generated since.

    A call of at least `window` tokens, more than one, is a prompt or a chunk of one; a shorter one is generated text
    and is kept. After a prompt whatever was kept before it, replies too, stands for election with it, and `budget`
    tokens are left, a share being of all tokens so far: in a conversation the prompt is all that was said.

    keys (B, G, room, D) and values (B, G, room, E): the first n rows, in the order of the text.
    """

    def __init__(self, record: artifacts.SnapKV) -> None:
        super().__init__()
        self.record = record
        self._held = 0
        # Where the last prompt ended that cost tokens.
        self._settled = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def kept(self) -> int:
        return self._held

    def mark(self) -> Self:
        """See Policy.mark: votes are counted into new memory."""
        return copy.copy(self)

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        past, total = self._held, self._held + call.length
        self.keys = with_room(self.keys, call.k, past, total)
        self.values = with_room(self.values, call.v, past, total)
        self.keys[:, :, past:total] = call.k
        self.values[:, :, past:total] = call.v
        self._held, self.seen = total, self.seen + call.length
        if not past and call.length > 1:
            out = call.whole()
        else:
            out = call.attend(call.q, self.keys[:, :, :total], self.values[:, :, :total])[0]
        if call.length >= max(2, self.record.window):
            self._compress(call)
        return out

    def truncate(self, length: int) -> bool:
        """See Policy.truncate."""
        if length < self._settled:
            return False
        self._held -= self.seen - length
        self.seen = length
        return True

    def _compress(self, call: Step) -> None:
        """Keep what the votes elect and the window."""
        assert self.keys is not None and self.values is not None
        window = self.record.window
        elected = max(tokens(self.record.budget, self.seen) - window, 0)
        earlier = self._held - window
        if elected >= earlier:
            return
        places = self._votes(call)[:, :, :earlier].topk(elected, dim=2).indices.sort(dim=2).values
        own = torch.arange(earlier, self._held, device=places.device).expand(*places.shape[:2], -1)
        rows = torch.cat([places, own], dim=2)[..., None]
        kept = rows.shape[2]
        # New memory: that of the prompt is freed.
        keys, values = (x.gather(2, rows.expand(-1, -1, -1, x.shape[3])) for x in (self.keys, self.values))
        self.keys, self.values = with_room(None, keys, 0, kept), with_room(None, values, 0, kept)
        self.keys[:, :, :kept], self.values[:, :, :kept] = keys, values
        self._held, self._settled = kept, self.seen

    def _votes(self, call: Step) -> Tensor:
        """(B, G, n - W): the window's attention by key, averaged over neighbours (zero beyond the ends)."""
        assert self.keys is not None and self.values is not None
        window, pool, n = self.record.window, self.record.pool, self._held
        done = scored_attention(
            call.q[:, :, -window:],
            self.keys[:, :, :n],
            self.values[:, :, :n],
            scale=call.scale,
            softcap=call.softcap,
            backend=call.backend,
        )
        assert done.scores is not None
        # Those of the window are no neighbours.
        return torch.nn.functional.avg_pool1d(done.scores[:, :, : n - window], pool, stride=1, padding=pool // 2)
