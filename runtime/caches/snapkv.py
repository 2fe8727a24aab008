"""SnapKV: the part of a prompt that its last queries attend to, and all that is generated.

SnapKV (Li et al. 2024), section 4.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens cached, W window, D head dim, E
value dim.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

import artifacts
from kernels.decode import decode_attention
from runtime.caches.paging import Paging, retained_tokens
from runtime.caches.policy import Policy
from runtime.caches.step import Step, View

_log = logging.getLogger("headwise")


def votes_of(record: artifacts.SnapKV, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention of the window's queries to each earlier key, averaged over neighbors.

    q (B, H, W, D), k (B, G, n, D), v (B, G, n, E) -> (B, G, n - W). The ends are padded with zeros;
    the window's own keys are no neighbors. Options are those of decode_attention.
    """
    result = decode_attention(q, k, v, scores="sum", **options)
    assert result.scores is not None
    scores = result.scores[:, :, : k.shape[2] - record.window]
    return torch.nn.functional.avg_pool1d(scores, record.pool, stride=1, padding=record.pool // 2)


def select_by_votes(votes: Tensor, count: int, window: int) -> Tensor:
    """Rows (B, G, count), ascending: those with most votes (B, G, n - W), and the window's own."""
    earlier = votes.shape[2]
    best = votes.topk(count - window, dim=2).indices.sort(dim=2).values
    own = torch.arange(earlier, earlier + window, device=votes.device)
    return torch.cat([best, own.expand(*best.shape[:2], -1)], dim=2)


def select_of_prompt(
    record: artifacts.SnapKV, q: Tensor, k: Tensor, v: Tensor, count: int, **scoring: Any
) -> Tensor:
    """Select tokens of a prompt: see Paging.select."""
    return select_by_votes(votes_of(record, q, k, v, **scoring), count, record.window)


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
    def paging(cls, record: artifacts.SnapKV) -> Paging:
        """See Policy.paging."""
        return Paging(
            front=record.budget, queries=record.window, select=select_of_prompt, record=record
        )

    def view(self, step: Step) -> View:
        """See Policy.view: all tokens."""
        first = max(self.cached) == 0
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
        held = self.cached[0]
        count = retained_tokens(self.record.budget, window, held, self.seen[0])
        if count < held and step.length < window:
            if not any(self.settled):
                _warn_short(window)
        elif count < held:
            self._keep(select_by_votes(self._votes(step), count, window))

    def _votes(self, call: Step) -> Tensor:
        """Votes (B, G, n - W) of the window's queries."""
        q = call.q[:, :, -self.record.window :]
        k = self.keys[:, :, : self.cached[0]]
        v = self.values[:, :, : self.cached[0]]
        return votes_of(self.record, q, k, v, **call.options)
