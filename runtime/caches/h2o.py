"""H2O: the tokens that got most attention so far, for each KV head, and the latest ones (H2O,
section 4, Algorithm 1).

Kept tokens lie in any order, for the order of keys is nothing to a query that sees them all, and
keep the rotations that the model gave them. A dropped token's row is taken by the last one: memory
is what is kept.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import artifacts
from kernels.decode import decode_attention
from kernels.decode.dropping import drop_lowest, ranks
from runtime.caches.policy import Policy, tokens
from runtime.caches.step import Step

# Rows beyond those needed: at least so many, and a share of the whole. A cache under shares grows
# slowly.
_ROOM = 8
_SHARE = 32
# Up to so many tokens are dropped one by one, in place.
_FEW = 16


class H2O(Policy):
    """Heavy hitters and the latest tokens, `heavy` and `recent` of them.

    A call sees all that was kept before it and, causally, itself, and adds to the scores. Then
    those are dropped that scored lowest of the tokens before the latest. "greedy" does so after
    each query (Algorithm 1), whatever calls the tokens come in; "top_k" once a call, so that a
    prompt is attended to in full. What a query has added to the scores cannot be taken out again.

    scores (B, G, room) fp32: the sum of a token's probabilities in all queries since, its own
    included, and positions (B, G, room) int32: its place in the text."""

    scores: Tensor
    positions: Tensor

    def __init__(self, record: artifacts.H2O) -> None:
        super().__init__()
        self.record = record

    @classmethod
    def why_not_in_vllm(cls, record: artifacts.H2O) -> str | None:
        """See Policy.why_not_in_vllm."""
        return (
            "it drops other tokens in each head at every step, and vLLM "
            "frees whole pages of all heads"
        )

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        outs = [self._attend(piece) for piece in self._pieces(call)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def room(self, needed: int) -> int:
        """See Policy.room; under counts it is known for ever."""
        heavy = self.record.heavy
        recent = self.record.recent
        if isinstance(heavy, int) and isinstance(recent, int) and needed <= heavy + recent + 1:
            return min(heavy + recent + 1, needed + max(256, needed))
        return needed + max(_ROOM, needed // _SHARE)

    def _pieces(self, call: Step) -> Iterator[Step]:
        """What of a call's tokens goes together: all, or as many as come before the next is
        dropped."""
        begin = 0
        while begin < call.length:
            # The state moves on with every piece.
            size = 1 if self.record.eviction == "greedy" else call.length
            while begin + size < call.length and self._fits(size) and self._fits(size + 1):
                size += 1
            yield call.slots(begin, begin + size)
            begin += size

    def _fits(self, more: int) -> bool:
        """Whether so many more tokens can be kept beside all that are."""
        return self.kept + more <= self._budget(self.seen + more)

    def _budget(self, seen: int) -> int:
        return tokens(self.record.heavy, seen) + tokens(self.record.recent, seen)

    def _attend(self, call: Step) -> Tensor:
        """(B, H, Q, E) of tokens that are taken in, and others dropped for them."""
        shape = call.k.shape[:3]
        device = call.k.device
        positions = torch.arange(
            self.seen, self.seen + call.length, dtype=torch.int32, device=device
        )
        keys, values, scores, _ = self._add(
            keys=call.k,
            values=call.v,
            scores=torch.zeros(shape, device=device),
            positions=positions.expand(shape),
        )
        how: dict[str, Any] = {
            "scale": call.scale,
            "softcap": call.softcap,
            "backend": call.backend,
        }
        done = decode_attention(call.q, keys, values, scores="sum", **how)
        assert done.scores is not None
        scores += done.scores
        self._evict(self._budget(self.seen), call.backend)
        self.settled = self.seen
        return done.out

    def _evict(self, keep: int, backend: str) -> None:
        """Drop the lowest of those before the latest until `keep` are left."""
        latest = self.seen - tokens(self.record.recent, self.seen)
        queries = self.seen if self.record.normalised else None
        if self.kept - keep > _FEW:
            held = slice(0, self.kept)
            ranked = ranks(
                self.scores[:, :, held], self.positions[:, :, held], latest=latest, queries=queries
            )
            self._keep(ranked.topk(keep, dim=2).indices.sort(dim=2).values)
        while self.kept > keep:
            memory = self.keys, self.values, self.scores, self.positions
            drop_lowest(*memory, rows=self.kept, latest=latest, queries=queries, backend=backend)
            self.kept -= 1
