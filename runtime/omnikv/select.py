"""Selection: the role of each layer in decode, and the tokens that filter layers select.

OmniKV (Hao et al., ICLR 2025), section 4.1. All heads of a filter layer select together.

Shapes: B batch, G KV heads, Q query length, K key length, C selected tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

import artifacts
from kernels.index import PAD
from kernels.topk import TopKCall

# Weights of the selector "exponential" halve from a query to the one before it.
_DECAY = 0.5


@dataclass(frozen=True)
class Role:
    """Role of a full-attention layer in decode: filter layer, served by one, or neither.

    Attributes:
        is_filter: it selects tokens.
        served_by: the filter layer that selects for it. With neither it attends to every token.
    """

    is_filter: bool = False
    served_by: int | None = None


def roles_of(section: artifacts.OmniKV, layers: Iterable[int]) -> dict[int, Role]:
    """Roles of full-attention layers."""
    return {
        layer: Role(layer in section.filter_layers, section.filter_of(layer)) for layer in layers
    }


class Scores(Protocol):
    """Cache of a filter layer, with the scores of its last queries (caches.growing.FilterLayer)."""

    def check_holds(self, layer: int, k_shape: torch.Size) -> None:
        """Raise HeadwiseError if a call's keys (B, G, K, D) are not those of the cache."""

    def remember(self, scores: Tensor) -> Tensor:
        """Add scores (B, K) of the newest query; returns those of the window (B, at most W, K)."""


class SelectionStats:
    """Counter of the tokens that each filter layer selected; adding waits for no device."""

    def __init__(self) -> None:
        # (2,) int64 each: selected tokens, and sequences.
        self._sums: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def add(self, layer: int, tokens: Tensor) -> None:
        """Add a step in which a filter layer selected tokens (B, C)."""
        valid = tokens != PAD
        new = torch.stack([valid.sum(), valid.new_ones(len(tokens)).sum()])
        with self._lock:
            if layer not in self._sums:
                # A later step may or may not run in inference mode.
                with torch.inference_mode(False):
                    self._sums[layer] = torch.zeros(new.shape, dtype=new.dtype, device=new.device)
            self._sums[layer] += new

    def mean(self, roles: Mapping[int, Role]) -> float | None:
        """Mean over the layers that are served, by their roles; None before any step."""
        with self._lock:
            sums = {layer: both.tolist() for layer, both in self._sums.items()}
        means = {layer: count / steps for layer, (count, steps) in sums.items() if steps}
        read = [means[role.served_by] for role in roles.values() if role.served_by in means]
        if read:
            return sum(read) / len(read)
        return None


class Selector:
    """Selection of tokens by the filter layers of an artifact's decode section.

    Attributes:
        group: the processes that share the heads of a layer; all select by the scores of all.
        stats: tokens selected so far.
    """

    def __init__(
        self, section: artifacts.OmniKV, layers: Iterable[int], *, group: Any = None
    ) -> None:
        self.section = section
        self.group = group
        self.roles = roles_of(section, layers)
        self.stats = SelectionStats()

    @property
    def tokens_read(self) -> float | None:
        """Mean tokens that a sparse layer read in a step; None before any. Waits for a GPU."""
        return self.stats.mean(self.roles)

    def count(self, k_len: int) -> int:
        """Tokens that a sparse layer attends to, of `k_len`."""
        budget = self.section.budget
        if isinstance(budget, int):
            return budget
        return max(1, ceil(budget * k_len))

    def select_tokens(
        self, scores: Tensor, q_len: int, starts: Tensor | None, cache: Scores | None
    ) -> Tensor:
        """Return tokens (B, C) int32, ascending and padded, for the layers of a filter layer.

        Args:
            scores: (B, K) of all heads, which are written to.
            q_len: queries of the step, the last tokens.
            starts: (B,) first key of each sequence; None where all start at the first.
            cache: the layer's, with the scores of earlier queries; without one the last query
                selects alone.
        """
        if cache is not None:
            rows = cache.remember(scores)
            weights = torch.ones(rows.shape[1], device=rows.device, dtype=torch.float32)
            if self.section.selector == "exponential":
                ages = torch.arange(rows.shape[1] - 1, -1, -1, device=rows.device)
                weights = _DECAY ** ages.float()
            scores = (rows * weights[:, None]).sum(1)
        k_len = scores.shape[-1]
        if starts is not None:
            outside = torch.arange(k_len, device=scores.device) < starts[:, None]
            scores.masked_fill_(outside, float("-inf"))
        newest = torch.arange(k_len - q_len, k_len, device=scores.device)[None]
        return _best(scores, newest, max(self.count(k_len), q_len))

    def select_tokens_each(
        self, scores: Tensor, ends: Tensor, width: int, *, q_len: int = 1
    ) -> Tensor:
        """Tokens (B, C) int32, ascending and padded, by the scores of this step alone.

        For callers without a FilterLayer. Nothing is read on the host, and no shape depends on the
        values of `ends`.

        Args:
            scores: (B, G, K) of the last `q_len` tokens of each sequence.
            ends: (B,) int32; sequence b ends before key ends[b]. One within its budget gets every
                token.
            width: C, at most K.
            q_len: new tokens of each sequence.
        """
        scores = self.max_over_heads(scores)
        budget = self.section.budget
        if isinstance(budget, int):
            counts = torch.full_like(ends, budget)
        else:
            counts = (ends.double() * budget).ceil().to(ends.dtype)
        counts.clamp_min_(q_len)
        back = torch.arange(q_len, 0, -1, device=ends.device)
        newest = (ends[:, None] - back).clamp_min_(0)
        return _best(scores, newest, width, ends=ends, counts=counts)

    def max_over_heads(self, scores: Tensor) -> Tensor:
        """Scores (B, K) of all KV heads, over all processes, from this process's (B, G, K)."""
        scores = scores.amax(1).contiguous()
        if self.group is not None:
            torch.distributed.all_reduce(
                scores, op=torch.distributed.ReduceOp.MAX, group=self.group
            )
        return scores


def _best(
    scores: Tensor,
    newest: Tensor,
    width: int,
    ends: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Best tokens (B, C) int32, ascending and padded, by scores (B, K), which are written to.

    Args:
        scores: (B, K), written to.
        newest: (B or 1, Q) the tokens of the queries: always selected, since a query sees itself.
        width: C.
        ends: see TopKCall.
        counts: see TopKCall.
    """
    scores.scatter_(-1, newest.long().expand(len(scores), -1), float("inf"))
    return TopKCall(scores, width, ends=ends, counts=counts).run()
