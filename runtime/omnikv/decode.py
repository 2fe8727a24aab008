"""Attention with chosen tokens: filter layers attend to everything, sparse layers to their choice.

OmniKV (Hao et al., ICLR 2025), sections 4.1 and 4.2. Selection covers generated tokens as well as
the prompt's.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen tokens, D head
dim, E value dim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

import artifacts
from kernels.decode import MAX_QUERIES, decode_attention
from runtime.omnikv.bank import OffloadedTensor, fetched
from runtime.omnikv.chunks import Past
from runtime.omnikv.select import Role, Selector, filter_cache


class _Step(threading.local):
    """Choices of the filter layers in this thread, by layer."""

    def __init__(self) -> None:
        # In the latest step: the number of keys, and the tokens.
        self.chosen: dict[int, tuple[int, Tensor]] = {}
        # For the latest chunk of a prompt.
        self.pasts: dict[int, Past] = {}


class OmniKV(Selector):
    """An artifact's decode section at work on the full-attention layers of a transformers model.

    In all methods q is (B, H, Q, D), k (B, G, K, D) and v (B, G, K, E), or stand-ins of a bank;
    sequence b starts at key starts[b].
    """

    def __init__(
        self, section: artifacts.OmniKV, layers: Iterable[int], *, backend: str, group: Any = None
    ) -> None:
        super().__init__(section, layers, group=group)
        self.backend = backend
        self._step = _Step()

    def serves(self, q: Tensor, k: Tensor) -> bool:
        """True for decode that gains from choosing: few queries, more keys than the budget."""
        return q.shape[2] <= MAX_QUERIES and k.shape[2] > self.count(k.shape[2])

    def attend(
        self,
        layer: int,
        role: Role,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        starts: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor | None:
        """Attention of one layer in a decode step: (B, H, Q, E).

        None where no filter layer has chosen in this step.
        """
        tokens = None
        k_len = k.shape[2]
        chosen = self._step.chosen
        # A step that fails in here leaves no choice behind that another request could take for its
        # own.
        chosen.pop(layer, None)
        if role.filter is not None and isinstance(k, OffloadedTensor):
            attended = k.offload.bank.attended(k.offload)
            if attended is None:
                return None
            # Chosen tokens only: no padding, and not all in order.
            k, v, tokens = attended
            starts = None
        elif role.filter is not None:
            if role.filter not in chosen or chosen[role.filter][0] != k_len:
                return None
            # The filter layer may lie on another device.
            tokens = chosen[role.filter][1].to(q.device, non_blocking=True)
        # A key's score is its largest probability (OmniKV, 4.1).
        scores: Literal["max", "none"] = "max" if role.filters else "none"
        result = decode_attention(
            q,
            fetched(k),
            fetched(v),
            tokens=tokens,
            scores=scores,
            starts=starts,
            scale=scale,
            softcap=softcap,
            backend=self.backend,
        )
        if result.scores is not None:
            tokens = self.choose(self.of_all_heads(result.scores), q.shape[2], starts, k)
            chosen[layer] = k_len, tokens
            self.reads.add(layer, tokens)
            cache = filter_cache(k)
            if cache is not None:
                cache.chose(tokens, k_len - q.shape[2])
        return result.out

    def attend_chunk(
        self,
        layer: int,
        role: Role,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        firsts: Sequence[int],
        *,
        backend: str,
        starts: Tensor | None,
        **options: Any,
    ) -> Tensor | None:
        """Attention of one layer for a chunk of a prompt: (B, H, Q, E).

        None where the chunk sees all of its past.

        Args:
            layer: its number.
            role: its role.
            q: queries.
            k: keys.
            v: values.
            firsts: `starts` on the host; the latter is None where all start at the first key.
            backend: of the chunk's own attention; choosing, of a few queries, goes by the
                section's.
            starts: see OmniKV.
            options: scale and softcap.
        """
        ratio = self.section.prefill_ratio
        q_len = q.shape[2]
        past = k.shape[2] - q_len
        if ratio is None:
            return None
        most = ceil(ratio * q_len)
        if most >= past:
            return None
        pasts = self._step.pasts
        pasts.pop(layer, None)
        if role.filters:
            # The chunk's last queries choose.
            queries = q[:, :, -min(self.section.window, MAX_QUERIES, q_len) :]
            scores = self._scores(queries, fetched(k), starts=starts, **options)[:, :, :past]
            pasts[layer] = Past.of(self.of_all_heads(scores), most, q_len, firsts, starts)
        if role.filter is None:
            chosen = None
        else:
            chosen = pasts.get(role.filter)
        if chosen is None or (chosen.q_len, chosen.before) != (q_len, past):
            return None
        return chosen.attend(q, k, v, backend=backend, **options)

    def after_prefill(self, role: Role, q: Tensor, k: Tensor, **options: Any) -> None:
        """Show a filter layer's selector the last queries of a prefill, each from its own position.

        Args:
            options: starts, scale and softcap, as attend has them.
        """
        cache = filter_cache(k)
        if self.section.selector == "last" or not role.filters or cache is None:
            return
        k_len = k.shape[2]
        last = min(self.section.window - 1, q.shape[2])
        for back in range(last, 0, -1):
            ends = torch.full((k.shape[0],), k_len - back + 1, dtype=torch.int32, device=k.device)
            scores = self._scores(q[:, :, q.shape[2] - back, None], k, ends=ends, **options)
            cache.remember(self.of_all_heads(scores))

    def _scores(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        """Largest probability (B, G, K) that queries give to each key."""
        result = decode_attention(q, k, k, scores="max", backend=self.backend, **options)
        assert result.scores is not None
        return result.scores
