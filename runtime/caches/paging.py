"""Budgets of tokens, and how pages of vLLM hold the tokens of a cache policy.

Shapes: B batch, H query heads, G KV heads, L tokens of a prompt, W queries, D head dim, E value
dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Rounding error of a fraction's product: 0.1 of 30 tokens are 3, not 4.
_ROUNDING = 1e-6


def budget_tokens(budget: int | float, seen: int) -> int:
    """Tokens that a budget allows: a count is itself, a float is a fraction of the tokens seen.

    A fraction is rounded up, so that it grows by no more than one with each token.
    """
    if isinstance(budget, float):
        return max(0, math.ceil(budget * seen - _ROUNDING))
    return budget


def retained_tokens(budget: int | float, least: int, cached: int, seen: int) -> int:
    """Tokens that a budget, or `least`, retains of the `cached` ones after `seen` tokens."""
    return min(cached, max(budget_tokens(budget, seen), least))


@dataclass(frozen=True, kw_only=True)
class Paging:
    """Where vLLM's pages hold the tokens of a KV head: at the front, and the latest ones.

    vLLM's scheduler frees the pages of the gap between both.
    - By default there is no gap: every token is cached.
    - With `window`, the first `front` tokens are cached, and the last ones.
    - With `select`, a prompt is cached until it is computed. Then `front` of its tokens are copied
      over its first ones; they are cached, and all that is generated.

    Attributes:
        front: budget of tokens at the front.
        window: last tokens that are cached, the newest included.
        select: select(record, q, k, v, count, *, logits) returns the tokens (B, G, count)
            of a prompt to copy, ascending, by its last queries (B, H, W, D), all keys (B, G, L, D)
            and all values (B, G, L, E). A function of a module: it is compared and pickled.
        record: the policy in the artifact, for `select`.
        queries: last queries that `select` reads, W; no fewer tokens are copied.
        unsupported_reason: reason why vLLM cannot serve the policy.
    """

    front: int | float = 0
    window: int | None = None
    select: Callable[..., Tensor] | None = None
    record: Any = None
    queries: int = 0
    unsupported_reason: str | None = None

    @property
    def drops(self) -> bool:
        """True if tokens are dropped."""
        return self.window is not None or self.select is not None

    def front_tokens(self, length: int) -> int:
        """Tokens at the front of a text, or of a prompt with `select`, of `length` tokens."""
        return retained_tokens(self.front, self.queries, length, length)

    def gap(self, length: int, prompt: int) -> tuple[int, int]:
        """Rows [begin, end) that the last of `length` tokens does not read, after a prompt."""
        if self.window is not None:
            begin = self.front_tokens(length)
            return begin, max(begin, length - self.window)
        if self.select is not None and length > prompt:
            return self.front_tokens(prompt), prompt
        return 0, 0
