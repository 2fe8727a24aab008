"""Chunks of a prompt that see only the selected part of their past (OmniKV-prefill).

OmniKV, appendix D.10.

Shapes: B batch, H query heads, G KV heads, Q tokens of the chunk, K tokens in all, n selected of
the K - Q before it, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kernels.dense import dense_attention
from kernels.ragged import Ragged
from kernels.topk import TopKCall
from runtime.omnikv.bank import OffloadedTensor


@dataclass(frozen=True, eq=False)
class ChunkSelection:
    """A filter layer's selection among the `before` tokens before a chunk.

    Attributes:
        tokens: (B, n) int64, the last counts[b] of row b, ascending; the entries before are unused.
        firsts: the first real token of each sequence.
    """

    before: int
    tokens: Tensor
    counts: tuple[int, ...]
    firsts: tuple[int, ...]

    @classmethod
    def from_scores(
        cls, scores: Tensor, width: int, q_len: int, firsts: Sequence[int], starts: Tensor | None
    ) -> Self:
        """Select the best tokens, at most `width`, by scores (B, K - Q) of a past.

        Sequence b starts at token firsts[b]; starts (B,) holds the same on the device, None where
        all start at the first.
        """
        past = scores.shape[1]
        if starts is not None:
            padding = torch.arange(past, device=scores.device) < starts[:, None]
            scores.masked_fill_(padding, float("-inf"))
        tokens = TopKCall(scores, width).run().long()
        counts = tuple(max(min(width, past - first), 0) for first in firsts)
        if min(counts) < width:
            missing = torch.tensor(
                [width - count for count in counts], device=tokens.device, dtype=torch.long
            )
            column = torch.arange(width, device=tokens.device) - missing[:, None]
            tokens = tokens.gather(1, column.clamp_(min=0))
        return cls(past, tokens.clamp_(max=past - 1), counts, tuple(firsts))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Causal attention of a chunk to the selected past and to itself.

        Args:
            q: (B, H, Q, D).
            k: (B, G, K, D).
            v: (B, G, K, E).
            options: logits and backend.

        Returns:
            (B, H, Q, E), zeros for padded queries.
        """
        # The filter layer may lie on another device.
        tokens = self.tokens.to(q.device, non_blocking=True)
        if isinstance(k, OffloadedTensor):
            k, v = k.banked.bank.selected(k.banked, tokens)
        else:
            k = self._gathered(k, tokens)
            v = self._gathered(v, tokens)
        return dense_attention(q, k, v, ragged=self._ragged(q.shape[2]), **options)[0]

    def _gathered(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Selected rows and the chunk's own (B, G, n + Q, ...) of states (B, G, K, ...)."""
        index = tokens[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
        return torch.cat([states.gather(2, index), states[:, :, self.before :]], dim=2)

    def _ragged(self, q_len: int) -> Ragged | None:
        """Ranges of each sequence's selected tokens and chunk; None if all are equally long."""
        width = self.tokens.shape[1]
        if min(self.counts) == width:
            return None
        ranges = []
        for row, (first, count) in enumerate(zip(self.firsts, self.counts, strict=True)):
            padded = min(max(first - self.before, 0), q_len)
            real = q_len - padded
            if real:
                ranges.append((row, padded, real, width - count + padded, count + real))
        return Ragged.from_sequences(ranges)
