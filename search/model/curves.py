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
_OF_ALL = ("change", "error", "recall", "tiles")


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """(L, H, C) fp64 each for one dense tail, NaN in layers without patterns; means over prompts.

    change: squared change of the head's part of the residual stream, relative to the stream's
    squared size, mean over the tokens. Each query's output is first multiplied by the factor that
    brings it nearest to dense attention's: a missed sink changes the output's scale, and is not
    counted. Changes add up over heads and layers as far as they are independent.
    error: relative L2 of the head's output.
    recall: attention mass kept.
    tiles: 64 x 64 tiles computed.
    text: of prompts that are text, half the squared first-order change of the loss on their tokens,
    query by query, in nats a token. By the empirical Fisher information this is the KL to dense
    attention to second order.
    drop: the first-order change of that loss itself, nats a token.
    answer: of prompts that have answers, the same as `text` of the answers' log-odds, for each
    answer token.
    tokens: that `drop` is of.
    texts, asked: prompts of either kind whose gradients are known."""

    change: np.ndarray
    error: np.ndarray
    recall: np.ndarray
    tiles: np.ndarray
    text: np.ndarray
    drop: np.ndarray
    answer: np.ndarray
    tokens: int
    texts: int
    asked: int

    @classmethod
    def mean(cls, curves: Sequence[Self]) -> Self:
        """Mean over prompts; of `text`, `drop` and `answer` over the prompts of their kind."""
        means = {
            name: np.mean([getattr(each, name) for each in curves], axis=0) for name in _OF_ALL
        }
        means["text"] = _weighted([each.text for each in curves], [each.texts for each in curves])
        means["answer"] = _weighted(
            [each.answer for each in curves], [each.asked for each in curves]
        )
        means["drop"] = _weighted([each.drop for each in curves], [each.tokens for each in curves])
        counts = {
            name: sum(getattr(each, name) for each in curves)
            for name in ("tokens", "texts", "asked")
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
        known the one kind is "change"."""
        losses = {}
        if self.texts:
            both = _geometric(self.change, self.text)
            trust = self.tokens / (self.tokens + _TOKENS_TO_TRUST)
            losses["text"] = np.maximum(both + trust * self.drop, both / 4)
        if self.asked:
            losses["answer"] = _geometric(self.change, self.answer)
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
