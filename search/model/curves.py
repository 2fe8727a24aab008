"""Curves: the loss of each head with each candidate, by which one budget is spent.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

# Tokens of text at which the change of a head's loss counts half. Measured on SmolLM2.
_TOKENS_TO_TRUST = 30_000
# Part of a loss that its first-order change never takes away.
_LEAST_LEFT = 1 / 4
_OF_ALL = ("change", "error", "recall", "tiles")


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """(L, H, C) fp64 each for one dense tail, NaN in layers without patterns; means over prompts.

    Attributes:
        change: squared change of the head's part of the residual stream, relative to the stream's
            squared size, mean over the tokens. Each query's output is first multiplied by the
            factor that brings it nearest to dense attention's: a missed sink changes the output's
            scale, and is not counted. Changes add up over heads and layers as far as they are
            independent.
        error: relative L2 of the head's output.
        recall: attention mass kept.
        tiles: 64 x 64 tiles computed.
        text_fisher: of prompts that are text, half the squared first-order change of the loss on
            their tokens, query by query, in nats a token. By the empirical Fisher information this
            is the KL to dense attention to second order.
        answer_fisher: of prompts that have answers, the same of the answers' log-odds, for each
            answer token.
        first_order: of prompts that are text, the first-order change of the loss itself, nats a
            token.
        text_tokens: that `first_order` is of.
        texts, asked: prompts of either kind whose gradients are known.
    """

    change: np.ndarray
    error: np.ndarray
    recall: np.ndarray
    tiles: np.ndarray
    text_fisher: np.ndarray
    first_order: np.ndarray
    answer_fisher: np.ndarray
    text_tokens: int
    texts: int
    asked: int

    @classmethod
    def mean(cls, curves: Sequence[Self]) -> Self:
        """Mean over prompts; of text's and answers' figures over the prompts of their kind."""
        means = {
            name: np.mean([getattr(each, name) for each in curves], axis=0) for name in _OF_ALL
        }
        means["text_fisher"] = _weighted(
            [each.text_fisher for each in curves], [each.texts for each in curves]
        )
        means["answer_fisher"] = _weighted(
            [each.answer_fisher for each in curves], [each.asked for each in curves]
        )
        means["first_order"] = _weighted(
            [each.first_order for each in curves], [each.text_tokens for each in curves]
        )
        counts = {
            name: sum(getattr(each, name) for each in curves)
            for name in ("text_tokens", "texts", "asked")
        }
        return cls(**means, **counts)

    @property
    def searched(self) -> np.ndarray:
        """(L,) True in layers that have candidates."""
        searched: np.ndarray = ~np.isnan(self.change).all(axis=(1, 2))
        return searched

    def losses(self) -> dict[str, np.ndarray]:
        """(L, H, C) losses by kind of prompt, "text" and "answer" where known, nats a token.

        A loss is the geometric mean of `change` and the squared first-order change of the loss, on
        the latter's scale. The one does not show what later layers make of it, the other has one
        sample of each token. To text the first-order change is added, since text that repeats
        itself loses more by dropped keys than the KL says. It is an estimate from few tokens, so it
        is shrunk towards 0, and never takes away more than three quarters. Where no gradients are
        known the one kind is "change".
        """
        losses = {}
        if self.texts:
            both = _geometric(self.change, self.text_fisher)
            trust = self.text_tokens / (self.text_tokens + _TOKENS_TO_TRUST)
            losses["text"] = np.maximum(both + trust * self.first_order, both * _LEAST_LEFT)
        if self.asked:
            losses["answer"] = _geometric(self.change, self.answer_fisher)
        return losses or {"change": self.change}

    def loss(self, weights: Mapping[str, float] | None = None) -> np.ndarray:
        """(L, H, C) the sum of `losses`, weighted by kind; equal weights if None."""
        total = np.zeros_like(self.change)
        for kind, values in self.losses().items():
            total = total + (weights or {}).get(kind, 1.0) * values
        return total


def _geometric(change: np.ndarray, squared: np.ndarray) -> np.ndarray:
    if not np.nansum(squared) > 0:
        return np.where(np.isnan(change), np.nan, 0.0)
    both = np.sqrt(np.maximum(change, 0) * np.maximum(squared, 0))
    scaled: np.ndarray = both * (np.nansum(squared) / np.nansum(both))
    return scaled


def _weighted(values: Sequence[np.ndarray], weights: Sequence[int]) -> np.ndarray:
    total = np.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total = total + weight * value
    return total / max(1, sum(weights))
