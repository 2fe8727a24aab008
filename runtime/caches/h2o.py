"""H2O: heavy hitters of each KV head, and the latest tokens (H2O, section 4, Algorithm 1).

Cached tokens are in any order, since a query that sees all keys does not depend on it, and keep the
rotations of their text positions. The last row moves into the row of a dropped token, so that
memory holds the cached tokens only.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens cached, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

import artifacts
from kernels.copies import on_device
from kernels.decode.dropping import EvictCall, ranks
from runtime.caches.paging import Paging, budget_tokens
from runtime.caches.policy import Policy
from runtime.caches.step import Step, View

# Headroom of new memory: a minimum in rows, and a fraction of the total. Budgets that are fractions
# grow slowly.
_HEADROOM = 8
_FRACTION = 32
# Up to this number, tokens are dropped one by one, in place.
_FEW = 16


class H2O(Policy):
    """`heavy` tokens with the highest scores and the `recent` latest tokens.

    A call sees all tokens cached before it and, causally, itself, and adds to the scores. Then the
    lowest scores among the tokens before the latest are dropped: "greedy" after each query
    (Algorithm 1), however tokens come; "top_k" once a call, so that a prompt is attended to in
    full. Scores cannot be taken out of the sums again, so nothing can be cropped.

    scores (B, G, size) fp32: sum of a token's probabilities in all queries since, its own included.
    positions (B, G, size) int32: its position in the text.
    """

    record: artifacts.H2O
    scores: Tensor
    positions: Tensor

    @classmethod
    def paging(cls, record: artifacts.H2O) -> Paging:
        """See Policy.paging."""
        return Paging(
            unsupported_reason=(
                "it drops other tokens in each head at every step, and vLLM frees whole pages of "
                "all heads"
            )
        )

    def snapshot(self) -> Self:
        """See Policy.snapshot: the last token takes the row of a dropped one."""
        return self.select(range(len(self.seen)))

    def size(self, needed: int) -> int:
        """See Policy.size; with budgets that are counts it never grows beyond their sum."""
        heavy = self.record.heavy
        recent = self.record.recent
        if isinstance(heavy, int) and isinstance(recent, int) and needed <= heavy + recent + 1:
            return min(heavy + recent + 1, needed + max(256, needed))
        return needed + max(_HEADROOM, needed // _FRACTION)

    def steps(self, call: Step) -> Iterator[Step]:
        """See Policy.steps: split nowhere, or before each query of "greedy"."""
        begin = 0
        while begin < call.length:
            # The state changes with every step.
            count = 1 if self.record.eviction == "greedy" else call.length
            while begin + count < call.length and self._fits(count) and self._fits(count + 1):
                count += 1
            yield call.slots(begin, begin + count)
            begin += count

    def _fits(self, more: int) -> bool:
        """True if the budget allows `more` tokens in addition to the cached ones."""
        return self.cached[0] + more <= self._budget(self.seen[0] + more)

    def _budget(self, seen: int) -> int:
        return budget_tokens(self.record.heavy, seen) + budget_tokens(self.record.recent, seen)

    def view(self, step: Step) -> View:
        """See Policy.view: all tokens."""
        shape = step.k.shape[:3]
        device = step.k.device
        if len(set(self.seen)) == 1:
            first = self.seen[0]
            positions = torch.arange(first, first + step.length, dtype=torch.int32, device=device)
        else:
            positions = on_device(self.seen, device, torch.int32)[:, None, None]
        keys, values, *_ = self._add(
            keys=step.k,
            values=step.v,
            scores=torch.zeros(shape, dtype=torch.float32, device=device),
            positions=positions.expand(shape),
        )
        return View(keys, values, self._ends(device), scored=True)

    def update(self, step: Step, scores: Tensor | None) -> None:
        """See Policy.update: add to the scores, drop the lowest."""
        assert scores is not None
        held = self.scores[:, :, : scores.shape[2]]
        held += scores
        # Backends without an eviction kernel use torch's operations.
        self._evict("reference" if step.backend == "reference" else "auto")
        self.settled = self.seen

    def _evict(self, backend: str) -> None:
        """Drop the lowest scores among the tokens before the latest until the budget is kept."""
        keep = [self._budget(seen) for seen in self.seen]
        latest = [seen - budget_tokens(self.record.recent, seen) for seen in self.seen]
        queries = self.seen if self.record.normalised else None
        if self.cached[0] - keep[0] > _FEW:
            # After many tokens at once, when all sequences are alike.
            scores = self.scores[:, :, : self.cached[0]]
            positions = self.positions[:, :, : self.cached[0]]
            ranked = ranks(scores, positions, latest=latest, queries=queries)
            self._keep(ranked.topk(keep[0], dim=2).indices.sort(dim=2).values)
        memory = self.keys, self.values, self.scores, self.positions
        while any(cached > limit for cached, limit in zip(self.cached, keep, strict=True)):
            both = list(zip(self.cached, keep, strict=True))
            rows = [cached if cached > limit else 0 for cached, limit in both]
            EvictCall(*memory, rows=rows, latest=latest, queries=queries).run(backend)
            self.cached = tuple(cached - (cached > limit) for cached, limit in both)
