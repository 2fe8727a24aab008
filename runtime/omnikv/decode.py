"""Decode as OmniKV does it: filter layers attend to everything and choose tokens, sparse layers attend to those.

OmniKV (Hao et al., ICLR 2025), sections 4.1 and 4.2. Selection covers generated tokens as well as the prompt's.

A choice is made by all heads of a filter layer together, or by some of its KV heads for those KV heads of later layers
that the artifact's head map names: Kascade (arXiv 2512.16391) maps heads so.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, U choices that a filter layer makes, C chosen
tokens, W window of the selector.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

import artifacts
from kernels.decode import MAX_QUERIES, decode_attention
from kernels.index import PAD
from kernels.patterns.choose import best_places
from runtime.omnikv.chunks import Past, attend_past, choose_past, gains
from runtime.omnikv.offload import OffloadedTensor, fetched
from runtime.omnikv.reads import Reads, taken
from runtime.omnikv.roles import Role, roles_of
from runtime.sharding import agreed

# Weights of the selector "exponential" halve from a query to the one before it.
_DECAY = 0.5


class FilterCache(Protocol):
    """What a filter layer's cache does for the choice: it keeps scores of earlier queries, and begins to fetch."""

    def remember(self, scores: Tensor) -> Tensor:
        """Take in scores (B, U, n) of the newest query; those of the window's queries (B, at most W, U, n)."""

    def chose(self, tokens: Tensor, past: int) -> None:
        """Begin to fetch tokens (B, U, C) of those before `past`."""


@dataclass(eq=False, kw_only=True)
class OmniKV:
    """The decode section of an artifact at work on one model.

    roles: of the full-attention layers. budget: tokens that a sparse layer attends to, or their share of the context.
    coverage: the share of a filter layer's attention that suffices, however few tokens hold it (top-p; Twilight, arXiv
    2502.02770); None: always the budget.
    selector: what chooses them: the "last" query's scores, or "uniform" or "exponential" means over `window` queries.
    prefill_ratio: tokens of the past that a chunk of a prompt sees in sparse layers, for each of its own; None: all.
    group: the processes that share the heads of a layer, which choose alike: by the scores of all of them.
    reads: how many tokens were chosen so far.
    """

    roles: Mapping[int, Role]
    budget: int | float
    selector: str
    window: int
    backend: str
    coverage: float | None = None
    prefill_ratio: float | None = None
    group: Any = None
    reads: Reads = field(default_factory=Reads, repr=False)
    _step: threading.local = field(default_factory=threading.local, repr=False)

    @classmethod
    def of(
        cls, section: artifacts.OmniKV, layers: Iterable[int], kv_heads: slice, *, backend: str, group: Any = None
    ) -> Self:
        """A section at work on these full-attention layers, of which this process has these KV heads."""
        return cls(
            roles=roles_of(section, layers, kv_heads),
            budget=section.budget,
            selector=section.selector,
            window=section.window,
            backend=backend,
            coverage=section.coverage,
            prefill_ratio=section.prefill_ratio,
            group=group,
        )

    @property
    def scores(self) -> Literal["max", "sum"]:
        """What a key's score adds up: attention that is to be covered, else the largest probability (OmniKV, 4.1)."""
        return "max" if self.coverage is None else "sum"

    @property
    def tokens_read(self) -> float | None:
        """Tokens that a KV head of a sparse layer here read in a step, on average; None before any. Waits for a GPU."""
        return self.reads.mean(self.roles)

    def count(self, k_len: int) -> int:
        """How many of `k_len` tokens a sparse layer attends to."""
        return self.budget if isinstance(self.budget, int) else max(1, ceil(self.budget * k_len))

    def serves(self, q: Tensor, k: Tensor) -> bool:
        """Whether a call is decode that gains from choosing: few queries, more keys than the budget."""
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
        """Attention of one layer in a decode step: (B, H, Q, E); None where no filter layer has chosen in this step.

        q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); sequence b starts at key starts[b].
        """
        tokens = None
        k_len = k.shape[2]
        # A step that fails in here leaves no choice behind that another request could take for its own.
        self._chosen().pop(layer, None)
        if role.filter is not None and isinstance(k, OffloadedTensor):
            attended = k.offload.attended()
            if attended is None:
                return None
            # Only what was chosen is there: no padding, and not all in order.
            (k, v, tokens), starts = attended, None
        elif role.filter is not None:
            keys, tokens = self._chosen().get(role.filter, (0, None))
            if keys != k_len:
                return None
            if tokens is not None:
                # The filter layer may lie on another device.
                tokens = taken(tokens, role.choices).to(q.device, non_blocking=True)
        done = decode_attention(
            q,
            fetched(k),
            fetched(v),
            tokens=tokens,
            starts=starts,
            scale=scale,
            softcap=softcap,
            scores=self.scores if role.filters else "none",
            backend=self.backend,
        )
        if role.filters:
            assert done.scores is not None
            chosen = self._choose(self._by_choice(role, done.scores), q.shape[2], starts, k)
            self._chosen()[layer] = (k_len, chosen)
            self.reads.add(layer, chosen)
            if (cache := _filter_cache(k)) is not None:
                cache.chose(chosen, k_len - q.shape[2])
        return done.out

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
        scale: float | None,
        softcap: float | None,
    ) -> Tensor | None:
        """Attention of one layer for a chunk of a prompt: (B, H, Q, E); None where it sees all of the past.

        q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); sequence b starts at key firsts[b]. backend: of the chunk's own
        attention; choosing, of a few queries, goes by that of the section.
        """
        ratio, q_len, k_len = self.prefill_ratio, q.shape[2], k.shape[2]
        if ratio is None or not gains(ratio, q_len, k_len):
            return None
        how: dict[str, Any] = {"scale": scale, "softcap": softcap}
        self._pasts().pop(layer, None)
        if role.filters:
            chosen = choose_past(
                *(q, fetched(k), firsts, starts),
                ratio=ratio,
                window=self.window,
                group=self.group,
                backend=self.backend,
                **how,
            )
            self._pasts()[layer] = chosen
        past = None if role.filter is None else self._pasts().get(role.filter)
        if past is None or (past.q_len, past.k_len) != (q_len, k_len):
            return None
        here = replace(past, tokens=past.tokens.to(q.device, non_blocking=True))
        return attend_past(here, q, k, v, backend=backend, **how)

    def after_prefill(
        self,
        role: Role,
        q: Tensor,
        k: Tensor,
        *,
        starts: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> None:
        """Let a filter layer's selector see the last queries of a prefill, each from its own position."""
        cache = _filter_cache(k)
        if self.selector == "last" or not role.filters or cache is None:
            return
        k_len, last = k.shape[2], min(self.window - 1, q.shape[2])
        for back in range(last, 0, -1):
            ends = torch.full((k.shape[0],), k_len - back + 1, dtype=torch.int32, device=k.device)
            query = q[:, :, q.shape[2] - back, None]
            seen = decode_attention(
                query,
                k,
                k,
                starts=starts,
                ends=ends,
                scale=scale,
                softcap=softcap,
                scores=self.scores,
                backend=self.backend,
            )
            assert seen.scores is not None
            cache.remember(self._by_choice(role, seen.scores))

    def choose_each(self, layer: int, role: Role, scores: Tensor, ends: Tensor, most: int, *, q_len: int = 1) -> Tensor:
        """What a filter layer's scores (B, G, K) of the last `q_len` tokens of each sequence choose: (B, U, C) int32.

        Ascending and padded; C is `most`, or K. Sequence b ends before key ends[b] (B,) int32: one that is no longer
        than its budget gets everything. Nothing is read on the host, and no shape depends on what `ends` holds.
        For callers that hold no cache of ours: by the scores of this step alone.
        """
        scores = self._by_choice(role, scores)
        whole = isinstance(self.budget, int)
        counts = torch.full_like(ends, self.budget) if whole else (ends.double() * self.budget).ceil().to(ends.dtype)
        counts.clamp_min_(q_len)
        back = torch.arange(q_len, 0, -1, device=ends.device)
        newest = (ends[:, None] - back).clamp_min_(0)[:, None]
        tokens = self._best(scores, newest, most, ends=ends, counts=counts)
        if self.coverage is not None:
            every, end = torch.arange(tokens.shape[-1], dtype=tokens.dtype, device=ends.device), ends[:, None, None]
            tokens = torch.where(end <= counts[:, None, None], torch.where(every < end, every, PAD), tokens)
        self.reads.add(layer, tokens, ends > counts)
        return tokens

    def _by_choice(self, role: Role, scores: Tensor) -> Tensor:
        """Scores (B, U, K) of each choice from those of this process's KV heads, (B, G, K)."""
        total = torch.amax if self.scores == "max" else torch.sum
        if role.choosers is None:
            return agreed(total(scores, 1, keepdim=True), self.group, self.scores)
        # Another process has the heads of a choice that has none here.
        parts = [
            total(torch.stack([scores[:, head] for head in heads]), 0) if heads else torch.zeros_like(scores[:, 0])
            for heads in role.choosers
        ]
        return agreed(torch.stack(parts, dim=1), self.group, self.scores)

    def _choose(self, scores: Tensor, q_len: int, starts: Tensor | None, k: Tensor) -> Tensor:
        """The tokens (B, U, C) int32, ascending and padded, for the layers that a filter layer serves."""
        cache = _filter_cache(k)
        if self.selector != "last" and cache is not None:
            rows = cache.remember(scores)
            weights = torch.ones(rows.shape[1], device=rows.device)
            if self.selector == "exponential":
                weights = _DECAY ** torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device)
            scores = (rows * weights[:, None, None]).sum(1)
        k_len = scores.shape[-1]
        if starts is not None:
            outside = torch.arange(k_len, device=scores.device) < starts[:, None, None]
            scores.masked_fill_(outside, float("-inf") if self.coverage is None else 0)
        newest = torch.arange(k_len - q_len, k_len, device=scores.device)[None, None]
        return self._best(scores, newest, max(self.count(k_len), q_len))

    def _best(self, scores: Tensor, newest: Tensor, most: int, **how: Any) -> Tensor:
        """The best tokens (B, U, C) int32, ascending and padded, by scores (B, U, K), which are written to.

        newest: (B or 1, 1, Q) the tokens that ask: they are always among them, since a query sees itself.
        how: ends and counts, as best_places has them.
        """
        choices, q_len = scores.shape[1], newest.shape[-1]
        newest = newest.long().expand(len(scores), choices, -1)
        if self.coverage is None:
            scores.scatter_(-1, newest, float("inf"))
            return best_places(scores, [most] * choices, [None] * choices, forced=0, **how)
        scores /= scores.sum(-1, keepdim=True).clamp_min_(1e-30)
        # best_places takes the first entries first: the newest tokens stand there, and all others behind them.
        first = torch.cat([scores.gather(-1, newest), scores[..., :-q_len]], -1)
        places = best_places(first, [most] * choices, [self.coverage] * choices, forced=q_len, **how)
        tokens = torch.where(places < q_len, newest[..., :1].to(places.dtype) + places, places - q_len)
        return torch.where(places == PAD, PAD, tokens).sort(-1).values

    def _chosen(self) -> dict[int, tuple[int, Tensor | None]]:
        """By filter layer: how many keys there were when it chose in this thread, and what it chose."""
        if not hasattr(self._step, "chosen"):
            self._step.chosen = {}
        chosen: dict[int, tuple[int, Tensor | None]] = self._step.chosen
        return chosen

    def _pasts(self) -> dict[int, Past]:
        """By filter layer: what it chose in this thread for the latest chunk."""
        if not hasattr(self._step, "pasts"):
            self._step.pasts = {}
        pasts: dict[int, Past] = self._step.pasts
        return pasts


def _filter_cache(keys: Tensor | None) -> FilterCache | None:
    """The filter layer's cache whose update() returned these keys, None where it was another's."""
    reference: Any = getattr(keys, "headwise_cache", None)
    cache = None if reference is None else reference()
    return cache if hasattr(cache, "remember") else None
