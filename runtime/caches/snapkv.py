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
from runtime.caches.policy import Policy, tokens
from runtime.caches.room import append
from runtime.caches.step import Step


def left_of(record: artifacts.SnapKV, held: int, seen: int) -> int:
    """How many of the `held` tokens are left after a prompt that ends after `seen` tokens of the text."""
    return min(held, max(tokens(record.budget, seen), record.window))


def votes_of(
    record: artifacts.SnapKV,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None,
    backend: str = "auto",
) -> Tensor:
    """(B, G, n - W): attention of queries (B, H, W, D) to keys (B, G, n, D), averaged over neighbours.

    Beyond the ends are zeros; the window's own keys are no neighbours. Values are (B, G, n, E).
    """
    done = scored_attention(q, k, v, scale=scale, softcap=softcap, backend=backend)
    assert done.scores is not None
    scores = done.scores[:, :, : k.shape[2] - record.window]
    return torch.nn.functional.avg_pool1d(scores, record.pool, stride=1, padding=record.pool // 2)


def elect(votes: Tensor, kept: int, window: int) -> Tensor:
    """(B, G, kept) ascending rows: those with most of the votes (B, G, n - W), and the window's own."""
    earlier = votes.shape[2]
    places = votes.topk(kept - window, dim=2).indices.sort(dim=2).values
    own = torch.arange(earlier, earlier + window, device=places.device).expand(*places.shape[:2], -1)
    return torch.cat([places, own], dim=2)


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
        self.keys, self.values = append(self.keys, call.k, past), append(self.values, call.v, past)
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
        kept = left_of(self.record, self._held, self.seen)
        if kept == self._held:
            return
        rows = elect(self._votes(call), kept, self.record.window)[..., None]
        # New memory: that of the prompt is freed.
        keys, values = (x.gather(2, rows.expand(-1, -1, -1, x.shape[3])) for x in (self.keys, self.values))
        self.keys, self.values = append(None, keys, 0), append(None, values, 0)
        self._held, self._settled = kept, self.seen

    def _votes(self, call: Step) -> Tensor:
        """(B, G, n - W), of the window's queries."""
        assert self.keys is not None and self.values is not None
        k, v = self.keys[:, :, : self._held], self.values[:, :, : self._held]
        q = call.q[:, :, -self.record.window :]
        return votes_of(self.record, q, k, v, scale=call.scale, softcap=call.softcap, backend=call.backend)
