"""Attention to selected tokens: filter layers attend to all and select, sparse layers read those.

OmniKV (Hao et al., ICLR 2025), sections 4.1 and 4.2. Selection covers generated tokens as well as
the prompt's.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C selected tokens, D head
dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import artifacts
from kernels.decode import MAX_QUERIES, decode_attention
from kernels.logits import Logits
from runtime.omnikv.bank import OffloadedTensor, fetched
from runtime.omnikv.chunks import ChunkSelection
from runtime.omnikv.select import Role, Scores, Selector
from runtime.omnikv.selection import Selection


class LayerCall(NamedTuple):
    """Attention call of one layer.

    q (B, H, Q, D), k (B, G, K, D) and v (B, G, K, E), or lazy tensors of a bank.

    Attributes:
        layer: the layer's number.
        role: its role.
        starts: (B,) int32, the first key of each sequence; None where all start at 0.
        logits: of the call.
        selection: what a filter layer selects in this forward: it writes it, and the layers that it
            serves read it. None for a layer that attends to every token.
        scores: the cache of a filter layer, which holds the scores of earlier queries; None for
            other layers, and where the last query selects alone.
    """

    layer: int
    role: Role
    q: Tensor
    k: Tensor
    v: Tensor
    starts: Tensor | None
    logits: Logits
    selection: Selection | None
    scores: Scores | None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernels."""
        return {"starts": self.starts, "logits": self.logits}


class OmniKV(Selector):
    """An artifact's decode section at work on the full-attention layers of a transformers model."""

    def __init__(
        self, section: artifacts.OmniKV, layers: Iterable[int], *, backend: str, group: Any = None
    ) -> None:
        super().__init__(section, layers, group=group)
        self.backend = backend
        self.filter_layers = frozenset(section.filter_layers)

    def attend(self, call: LayerCall) -> Tensor | None:
        """Attention of one layer in a decode step: (B, H, Q, E).

        None if no filter layer has selected tokens in this step.
        """
        layer, role, q, k, v, starts, logits, selection, own = call
        tokens = None
        k_len = k.shape[2]
        if role.served_by is not None:
            if selection is None or selection.tokens is None:
                return None
            # A user may have cropped or replaced the keys of one layer: its tokens are other ones.
            if selection.past != k_len - q.shape[2]:
                return None
            attended = None
            if isinstance(k, OffloadedTensor):
                attended = k.banked.bank.attended(k.banked)
            if attended is not None:
                # Selected tokens only: no padding, and not all in order.
                k, v, tokens = attended
                starts = None
            else:
                # The filter layer may lie on another device.
                tokens = selection.tokens.to(q.device, non_blocking=True)
        # A key's score is its largest probability (OmniKV, 4.1).
        scores: Literal["max", "none"] = "max" if role.is_filter else "none"
        result = decode_attention(
            q,
            fetched(k),
            fetched(v),
            tokens=tokens,
            scores=scores,
            starts=starts,
            logits=logits,
            backend=self.backend,
        )
        if result.scores is not None:
            tokens = self.select_tokens(self.max_over_heads(result.scores), q.shape[2], starts, own)
            assert selection is not None
            selection.select(tokens, k_len - q.shape[2])
            self.stats.add(layer, tokens)
        return result.out

    def attend_chunk(
        self, call: LayerCall, firsts: Sequence[int], *, backend: str
    ) -> Tensor | None:
        """Attention of one layer for a chunk of a prompt: (B, H, Q, E).

        None if the chunk sees all of its past.

        Args:
            call: the call.
            firsts: its `starts` on the host, zeros where they are None.
            backend: of the chunk's own attention; scores of a few queries use the section's.
        """
        _, role, q, k, v, starts, logits, selection, _ = call
        ratio = self.section.prefill_ratio
        q_len = q.shape[2]
        past = k.shape[2] - q_len
        if ratio is None:
            return None
        count = ceil(ratio * q_len)
        if count >= past:
            return None
        if selection is None:
            return None
        if role.is_filter:
            # The chunk's last queries select.
            queries = q[:, :, -min(self.section.window, MAX_QUERIES, q_len) :]
            scores = self._scores(queries, fetched(k), **call.options)[:, :, :past]
            selection.chunk = ChunkSelection.from_scores(
                self.max_over_heads(scores), count, q_len, firsts, starts
            )
        if role.served_by is None or selection.chunk is None:
            return None
        return selection.chunk.attend(q, k, v, backend=backend, logits=logits)

    def remember_prefill(self, call: LayerCall) -> None:
        """Keep the scores of a prefill's last queries, each from its own position."""
        if call.scores is None:
            return
        q = call.q
        k = call.k
        k_len = k.shape[2]
        last = min(self.section.window - 1, q.shape[2])
        for back in range(last, 0, -1):
            ends = torch.full((k.shape[0],), k_len - back + 1, dtype=torch.int32, device=k.device)
            scores = self._scores(q[:, :, q.shape[2] - back, None], k, ends=ends, **call.options)
            call.scores.remember(self.max_over_heads(scores))

    def _scores(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        """Largest probability (B, G, K) of each key over the queries."""
        result = decode_attention(q, k, k, scores="max", backend=self.backend, **options)
        assert result.scores is not None
        return result.scores
