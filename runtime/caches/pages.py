"""Budgets of tokens, and how pages hold what a cache policy keeps.

Shapes: B batch, H query heads, G KV heads, L tokens of a prompt, W window, D head dim, E value dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from kernels.logits import Logits

# Rounding error of a fraction's product: 0.1 of 30 tokens are 3, not 4.
_ROUNDING = 1e-6


def tokens(budget: int | float, seen: int) -> int:
    """Tokens that a budget allows: a count is itself, a float is a fraction of the tokens seen.

    A fraction is rounded up, so that it grows by no more than one with each token.
    """
    if isinstance(budget, float):
        return max(0, math.ceil(budget * seen - _ROUNDING))
    return budget


def left_of_prompt(budget: int | float, window: int, held: int, seen: int) -> int:
    """Tokens left of `held` after a prompt that ends at token `seen` of the text."""
    return min(held, max(tokens(budget, seen), window))


@dataclass(frozen=True)
class Vote(ABC):
    """A choice of a prompt's tokens by its last `window` queries, which are kept themselves."""

    window: int

    @abstractmethod
    def select(self, q: Tensor, k: Tensor, v: Tensor, count: int, *, logits: Logits) -> Tensor:
        """Rows (B, G, count) of a prompt, ascending.

        q (B, H, W, D) are its last queries, k (B, G, L, D) and v (B, G, L, E) all of it.
        """


@dataclass(frozen=True)
class Paging:
    """Where pages hold what a policy keeps: rows at the front, and all rows from a later one on.

    Pages between belong to nobody (runtime.vllm, which frees them).

    Attributes:
        front: tokens at the front, a count, or a fraction of the prompt.
        window: how many of the last tokens are kept, too; None: all that follow the prompt.
        vote: selects the tokens of a prompt that are copied to the front once it is computed, in
            each KV head for itself; None: they are the first ones.
    """

    front: int | float = 0
    window: int | None = None
    vote: Vote | None = None

    @property
    def drops(self) -> bool:
        """True if some tokens are not kept."""
        return self.window is not None or self.vote is not None

    def left(self, prompt: int) -> int:
        """Tokens that are kept of a prompt, where a vote selects them."""
        assert self.vote is not None
        return left_of_prompt(self.front, self.vote.window, prompt, prompt)


EVERY_PAGE = Paging()
"""Every token is kept."""
