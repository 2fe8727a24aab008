"""Chunks of a prompt that see of the past only what a filter layer chose: OmniKV-prefill (OmniKV,
appendix D.10).

Shapes: B batch, H query heads, G KV heads, Q tokens of the chunk, K tokens in all, n chosen of the
K - Q before it, D head dim, E value dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kernels.dense import dense_attention
from kernels.patterns.choose import best_places
from kernels.ragged import Ragged
from runtime.omnikv.bank import OffloadedTensor


@dataclass(frozen=True, eq=False)
class Past:
    """What a filter layer chose of the `before` tokens before a chunk.

    tokens (B, n) int64: those of sequence b are the last counts[b] of its row, ascending; what
    stands before is any. firsts: the first real token of each sequence."""

    q_len: int
    before: int
    tokens: Tensor
    counts: tuple[int, ...]
    firsts: tuple[int, ...]

    @classmethod
    def of(
        cls, scores: Tensor, most: int, q_len: int, firsts: Sequence[int], starts: Tensor | None
    ) -> Self:
        """The best tokens, at most so many, by scores (B, K - Q) of a past.

        Sequence b starts at token firsts[b], which `starts` says on the device; None where all
        start at the first."""
        past = scores.shape[1]
        if starts is not None:
            scores.masked_fill_(
                torch.arange(past, device=scores.device) < starts[:, None], float("-inf")
            )
        tokens = best_places(scores[:, None], [most], [None], forced=0)[:, 0].long()
        counts = tuple(max(min(most, past - first), 0) for first in firsts)
        if min(counts) < most:
            short = torch.tensor([most - count for count in counts], device=tokens.device)
            tokens = tokens.gather(
                1, (torch.arange(most, device=tokens.device) - short[:, None]).clamp_(min=0)
            )
        return cls(q_len, past, tokens.clamp_(max=past - 1), counts, tuple(firsts))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """Causal attention of a chunk to what was chosen of the past and to itself: (B, H, Q, E).

        q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); zeros for padded queries. how: scale,
        softcap and backend."""
        # The filter layer may lie on another device.
        tokens = self.tokens.to(q.device, non_blocking=True)
        if isinstance(k, OffloadedTensor):
            k, v = k.offload.bank.chosen(k.offload, tokens)
        else:
            at = tokens[:, None, :, None]
            past = (x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))
            k, v = (
                torch.cat([some, x[:, :, self.before :]], dim=2)
                for some, x in zip(past, (k, v), strict=True)
            )
        return dense_attention(q, k, v, ragged=self._ragged(), **how)[0]

    def _ragged(self) -> Ragged | None:
        """Where each sequence's chosen tokens and its part of the chunk lie; None where they all
        are as long."""
        most = self.tokens.shape[1]
        if min(self.counts) == most:
            return None
        late = [min(max(first - self.before, 0), self.q_len) for first in self.firsts]
        return Ragged.of(
            (b, skipped, self.q_len - skipped, most - count + skipped, count + self.q_len - skipped)
            for b, (skipped, count) in enumerate(zip(late, self.counts, strict=True))
            if skipped < self.q_len
        )
