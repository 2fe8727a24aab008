"""Budgets of tokens, and how pages of vLLM hold what a cache policy keeps.

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


class Pages:
    """Layout of a policy's kept tokens in pages of vLLM, which frees other pages (runtime.vllm)."""


@dataclass(frozen=True)
class EveryPage(Pages):
    """Every token is kept."""


@dataclass(frozen=True)
class EndPages(Pages):
    """The first `sinks` tokens and the last `window` are kept, by text positions."""

    sinks: int
    window: int


@dataclass(frozen=True)
class PromptPages(Pages, ABC):
    """A part of each prompt, elected by its last `window` queries, and all that is generated.

    KV heads of a layer may keep unlike parts.
    """

    budget: int | float
    window: int

    def left(self, prompt: int) -> int:
        """Tokens that are kept of a prompt."""
        return left_of_prompt(self.budget, self.window, prompt, prompt)

    @abstractmethod
    def select(self, q: Tensor, k: Tensor, v: Tensor, *, logits: Logits) -> Tensor:
        """Tokens (B, G, n) of a prompt that are kept, ascending.

        q (B, H, W, D) are its last queries, k (B, G, L, D) and v (B, G, L, E) all of it.
        """
