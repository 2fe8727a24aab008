"""Attention of a round: verification attends to every token and chooses, drafts attend to what was chosen.

The choice costs no reading of keys: verification reads all of them in any case. Drafts then read in every layer that
does not slide no more than the budget of the artifact's decode section, and the tokens since.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen tokens, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from kernels.decode import decode_attention
from kernels.patterns.choose import best_places
from runtime.omnikv.decode import OmniKV

_now: ContextVar[Round | None] = ContextVar("headwise_round", default=None)


class Round:
    """What each layer of one generation chose when it last verified.

    drafting: whether calls are drafts. chooses: whether verification also chooses; without it, it is dense decode.
    """

    def __init__(self, decode: OmniKV) -> None:
        self.decode = decode
        self.drafting, self.chooses = False, True
        # By layer: how many keys there were to choose from, and the chosen (B, G, C) int32, ascending.
        self._chosen: dict[int, tuple[int, Tensor]] = {}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let this generation's calls, those of this thread and context, be served by it."""
        former = _now.set(self)
        try:
            yield
        finally:
            _now.reset(former)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, starts: Tensor | None, **how: Any) -> Tensor:
        """(B, H, Q, E) by the tokens that the layer chose, or by all; sequence b starts at key starts[b].

        q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); how: scale and softcap.
        """
        how |= {"starts": starts, "backend": self.decode.backend}
        if self.drafting and layer in self._chosen:
            return decode_attention(q, k, v, tokens=self._tokens(layer, q, k, starts), **how).out
        if self.drafting or not self.chooses or not self.decode.serves(q, k):
            return decode_attention(q, k, v, **how).out
        done = decode_attention(q, k, v, scores="max", **how)
        assert done.scores is not None
        # Of the queries' own keys some may be dropped again; drafts see all that are there.
        past = k.shape[2] - q.shape[2]
        scores, heads = done.scores[:, :, :past].contiguous(), k.shape[1]
        if starts is not None:
            scores.masked_fill_(torch.arange(past, device=q.device) < starts[:, None, None], float("-inf"))
        size = min(self.decode.count(past), past)
        self._chosen[layer] = past, best_places(scores, [size] * heads, [None] * heads, forced=0)
        return done.out

    def _tokens(self, layer: int, q: Tensor, k: Tensor, starts: Tensor | None) -> Tensor:
        """(B, G, C + n) int32: the layer's choice and the n tokens since."""
        seen, chosen = self._chosen[layer]
        since = torch.arange(seen, k.shape[2], dtype=torch.int32, device=q.device)
        tokens = torch.cat([chosen, since.expand(*chosen.shape[:2], -1)], dim=2)
        # Of a padded sequence fewer may have been chosen: what fills them up comes last.
        return tokens if starts is None else tokens.sort(dim=2).values


def round_of(decode: OmniKV | None) -> Round | None:
    """The round that serves calls of this decode section here and now, None where none does."""
    now = _now.get()
    return now if now is not None and now.decode is decode else None
