"""SnapKV: the part of a prompt that its last queries attend to, and all that is generated.

SnapKV (Li et al. 2024), section 4.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, W window, D head dim, E
value dim.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

import artifacts
from kernels.decode import decode_attention
from kernels.logits import Logits
from runtime.caches.pages import Paging, Vote, left_of_prompt
from runtime.caches.policy import Policy
from runtime.caches.step import Step, View

_log = logging.getLogger("headwise")


@dataclass(frozen=True)
class SnapKVVote(Vote):
    """Attention of a prompt's last queries to each earlier key, averaged over `pool` neighbors.

    The ends are padded with zeros; the window's own keys are no neighbors.
    """

    pool: int

    def select(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        count: int,
        *,
        logits: Logits,
        backend: str = "auto",
    ) -> Tensor:
        """See Vote.select: those with most votes, and the window's own."""
        window = self.window
        result = decode_attention(
            q[:, :, -window:], k, v, logits=logits, scores="sum", backend=backend
        )
        assert result.scores is not None
        earlier = k.shape[2] - window
        scores = result.scores[:, :, :earlier]
        pool = self.pool
        votes = torch.nn.functional.avg_pool1d(scores, pool, stride=1, padding=pool // 2)
        best = votes.topk(count - window, dim=2).indices.sort(dim=2).values
        own = torch.arange(earlier, earlier + window, device=votes.device)
        return torch.cat([best, own.expand(*best.shape[:2], -1)], dim=2)


@functools.cache
def _warn_short(window: int) -> None:
    """Warn once that a text exceeds its budget, and no call of it was as long as the window."""
    _log.warning(
        "snapkv has kept every token: no call was as long as its window of %d tokens, and shorter "
        "ones count as generated text; prefill in chunks of %d tokens or more",
        window,
        window,
    )


class SnapKV(Policy):
    """Tokens selected by a prompt's last `window` queries, those queries' own, and all generated.

    A call of at least `window` tokens, more than one, is a prompt or a chunk of one; a shorter one
    is generated text and is kept. After a prompt, `budget` tokens are selected from it and from all
    tokens cached before it, replies too. A budget that is a fraction is of all tokens so far: in a
    conversation the whole text is the prompt.
    """

    record: artifacts.SnapKV

    @classmethod
    def paged(cls, record: artifacts.SnapKV) -> Paging | str:
        """See Policy.paged."""
        return Paging(front=record.budget, vote=SnapKVVote(record.window, record.pool))

    def view(self, step: Step) -> View:
        """See Policy.view: all tokens."""
        first = max(self.kept) == 0
        keys, values = self._add(keys=step.k, values=step.v)
        if step.length == 1:
            return View(keys, values, self._ends(keys.device))
        if first:
            return View(step.k, step.v, whole=True)
        return View(keys, values)

    def update(self, step: Step, scores: Tensor | None) -> None:
        """See Policy.update: only after a prompt or a chunk of one."""
        window = self.record.window
        if step.length == 1:
            return
        held = self.kept[0]
        count = left_of_prompt(self.record.budget, window, held, self.seen[0])
        if count < held and step.length < window:
            if not any(self.settled):
                _warn_short(window)
        elif count < held:
            k = self.keys[:, :, :held]
            v = self.values[:, :, :held]
            vote = SnapKVVote(window, self.record.pool)
            self._keep(vote.select(step.q, k, v, count, **step.options))
