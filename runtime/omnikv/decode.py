"""Decode as OmniKV does it: filter layers attend to everything and choose tokens, sparse layers
attend to those.

OmniKV (Hao et al., ICLR 2025), sections 4.1 and 4.2. Selection covers generated tokens as well as
the prompt's.

A choice is made by all heads of a filter layer together.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen tokens, W window
of the selector."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

import artifacts
from kernels.decode import MAX_QUERIES, decode_attention
from kernels.patterns.choose import best_places
from runtime.omnikv.bank import OffloadedTensor, fetched
from runtime.omnikv.chunks import Past
from runtime.omnikv.roles import Reads, Role, roles_of

# Weights of the selector "exponential" halve from a query to the one before it.
_DECAY = 0.5


class _Step(threading.local):
    """What filter layers chose in this thread, by layer."""

    def __init__(self) -> None:
        # For the latest step: how many keys there were, and the tokens.
        self.chosen: dict[int, tuple[int, Tensor]] = {}
        # For the latest chunk of a prompt.
        self.pasts: dict[int, Past] = {}


class OmniKV:
    """The decode section of an artifact at work on full-attention layers.

    group: the processes that share the heads of a layer, which choose alike: by the scores of all
    of them. reads: how many tokens were chosen so far."""

    def __init__(
        self, section: artifacts.OmniKV, layers: Iterable[int], *, backend: str, group: Any = None
    ) -> None:
        self.section = section
        self.backend = backend
        self.group = group
        self.roles = roles_of(section, layers)
        self.reads = Reads()
        self._step = _Step()

    @property
    def tokens_read(self) -> float | None:
        """Tokens that a sparse layer here read in a step, on average; None before any. Waits for a
        GPU."""
        return self.reads.mean(self.roles)

    def count(self, k_len: int) -> int:
        """How many of `k_len` tokens a sparse layer attends to."""
        budget = self.section.budget
        return budget if isinstance(budget, int) else max(1, ceil(budget * k_len))

    def serves(self, q: Tensor, k: Tensor) -> bool:
        """Whether a call is decode that gains from choosing: few queries, more keys than the
        budget."""
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
        **how: Any,
    ) -> Tensor | None:
        """Attention of one layer in a decode step: (B, H, Q, E); None where no filter layer has
        chosen in this step.

        q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); sequence b starts at key starts[b]. how:
        scale and softcap."""
        tokens = None
        k_len = k.shape[2]
        step = self._step.chosen
        # A step that fails in here leaves no choice behind that another request could take for its
        # own.
        step.pop(layer, None)
        if role.filter is not None and isinstance(k, OffloadedTensor):
            attended = k.offload.bank.attended(k.offload)
            if attended is None:
                return None
            # Only what was chosen is there: no padding, and not all in order.
            (k, v, tokens) = attended
            starts = None
        elif role.filter is not None:
            if role.filter not in step or step[role.filter][0] != k_len:
                return None
            # The filter layer may lie on another device.
            tokens = step[role.filter][1].to(q.device, non_blocking=True)
        how |= {"starts": starts, "backend": self.backend}
        # A key's score is its largest probability (OmniKV, 4.1).
        scores: Literal["max", "none"] = "max" if role.filters else "none"
        done = decode_attention(q, fetched(k), fetched(v), tokens=tokens, scores=scores, **how)
        if done.scores is not None:
            chosen = self._choose(self._of_all_heads(done.scores), q.shape[2], starts, k)
            step[layer] = k_len, chosen
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
        **how: Any,
    ) -> Tensor | None:
        """Attention of one layer for a chunk of a prompt: (B, H, Q, E); None where it sees all of
        the past.

        q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); sequence b starts at key firsts[b], which
        `starts` says on the device. backend: of the chunk's own attention; choosing, of a few
        queries, goes by that of the section. how: scale and softcap."""
        ratio = self.section.prefill_ratio
        q_len = q.shape[2]
        past = k.shape[2] - q.shape[2]
        if ratio is None or (most := ceil(ratio * q_len)) >= past:
            return None
        self._step.pasts.pop(layer, None)
        if role.filters:
            # The chunk's last queries choose, over all heads together.
            queries = q[:, :, -min(self.section.window, MAX_QUERIES, q_len) :]
            keys = fetched(k)
            how_few = how | {"starts": starts, "backend": self.backend}
            seen = decode_attention(queries, keys, keys, scores="max", **how_few)
            assert seen.scores is not None
            scores = self._of_all_heads(seen.scores[:, :, :past])
            self._step.pasts[layer] = Past.of(scores, most, q_len, firsts, starts)
        chosen = None if role.filter is None else self._step.pasts.get(role.filter)
        if chosen is None or (chosen.q_len, chosen.before) != (q_len, past):
            return None
        return chosen.attend(q, k, v, backend=backend, **how)

    def after_prefill(self, role: Role, q: Tensor, k: Tensor, **how: Any) -> None:
        """Let a filter layer's selector see the last queries of a prefill, each from its own
        position.

        how: starts, scale and softcap, as attend has them.
        """
        cache = _filter_cache(k)
        if self.section.selector == "last" or not role.filters or cache is None:
            return
        k_len = k.shape[2]
        last = min(self.section.window - 1, q.shape[2])
        how |= {"scores": "max", "backend": self.backend}
        for back in range(last, 0, -1):
            ends = torch.full((k.shape[0],), k_len - back + 1, dtype=torch.int32, device=k.device)
            seen = decode_attention(q[:, :, q.shape[2] - back, None], k, k, ends=ends, **how)
            assert seen.scores is not None
            cache.remember(self._of_all_heads(seen.scores))

    def choose_each(
        self, layer: int, scores: Tensor, ends: Tensor, most: int, *, q_len: int = 1
    ) -> Tensor:
        """What a filter layer's scores (B, G, K) of the last `q_len` tokens of each sequence
        choose: (B, C) int32.

        Ascending and padded; C is `most`, or K. Sequence b ends before key ends[b] (B,) int32: one
        that is no longer than its budget gets everything. Nothing is read on the host, and no shape
        depends on what `ends` holds. For callers that hold no cache of ours: by the scores of this
        step alone."""
        scores = self._of_all_heads(scores)
        budget = self.section.budget
        whole = isinstance(budget, int)
        counts = (
            torch.full_like(ends, budget)
            if whole
            else (ends.double() * budget).ceil().to(ends.dtype)
        )
        counts.clamp_min_(q_len)
        back = torch.arange(q_len, 0, -1, device=ends.device)
        newest = (ends[:, None] - back).clamp_min_(0)
        tokens = _best(scores, newest, most, ends=ends, counts=counts)
        self.reads.add(layer, tokens, ends > counts)
        return tokens

    def _of_all_heads(self, scores: Tensor) -> Tensor:
        """Scores (B, K) of all KV heads together from those of this process's, (B, G, K)."""
        scores = scores.amax(1).contiguous()
        if self.group is not None:
            torch.distributed.all_reduce(
                scores, op=torch.distributed.ReduceOp.MAX, group=self.group
            )
        return scores

    def _choose(self, scores: Tensor, q_len: int, starts: Tensor | None, k: Tensor) -> Tensor:
        """The tokens (B, C) int32, ascending and padded, for the layers that a filter layer serves;
        scores: (B, K)."""
        cache = _filter_cache(k)
        if self.section.selector != "last" and cache is not None:
            rows = cache.remember(scores)
            weights = torch.ones(rows.shape[1], device=rows.device)
            if self.section.selector == "exponential":
                weights = _DECAY ** torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device)
            scores = (rows * weights[:, None]).sum(1)
        k_len = scores.shape[-1]
        if starts is not None:
            outside = torch.arange(k_len, device=scores.device) < starts[:, None]
            scores.masked_fill_(outside, float("-inf"))
        newest = torch.arange(k_len - q_len, k_len, device=scores.device)[None]
        return _best(scores, newest, max(self.count(k_len), q_len))


def _best(scores: Tensor, newest: Tensor, most: int, **how: Any) -> Tensor:
    """The best tokens (B, C) int32, ascending and padded, by scores (B, K), which are written to.

    newest: (B or 1, Q) the tokens that ask: they are always among them, since a query sees itself.
    how: ends and counts, as best_places has them.
    """
    scores.scatter_(-1, newest.long().expand(len(scores), -1), float("inf"))
    return best_places(scores[:, None], [most], [None], forced=0, **how)[:, 0]


def _filter_cache(keys: Tensor) -> Any | None:
    """The filter layer's cache (runtime.caches.banked) whose update() returned these keys, None
    where another did."""
    reference = getattr(keys, "headwise_cache", None)
    return None if reference is None else reference()
