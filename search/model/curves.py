"""Curves: how much each head loses with each candidate, by which a budget for the whole model is
spent.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

# Tokens of text from which the change of a head's loss is known as well as it is not. Measured on
# SmolLM2.
_TOKENS_TO_TRUST = 30_000
_OF_ALL = ("change", "error", "recall", "tiles")


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """(L, H, C) fp64 each for one dense tail, NaN in layers left alone; means over prompts.

    change: squared change of what the head adds to the residual stream, relative to the stream's
    squared size, mean
        over the tokens. Of heads and layers these add up as far as changes are independent of one
        another.
    error: relative L2 of the head's output. recall: attention mass kept. tiles: 64 x 64 tiles
    computed. text: of prompts that are text, half the squared first-order change of the loss on
    their tokens, by tiles of 64, in
        nats a token: to second order, by the empirical Fisher information, the KL to dense
        attention.
    drop: the first-order change of that loss itself, nats a token. answer: of prompts that have
    answers, the same as `text` of the answers' log-odds, for each answer token. tokens: how many
    tokens `drop` is of. texts, asked: prompts of either kind whose gradients are known."""

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
        """Of several prompts: over all of them, and of `text`, `drop` and `answer` over those of
        their kind."""
        found = {name: np.mean([getattr(one, name) for one in curves], axis=0) for name in _OF_ALL}
        found["text"] = _weighted([one.text for one in curves], [one.texts for one in curves])
        found["answer"] = _weighted([one.answer for one in curves], [one.asked for one in curves])
        found["drop"] = _weighted([one.drop for one in curves], [one.tokens for one in curves])
        counts = {
            name: sum(getattr(one, name) for one in curves) for name in ("tokens", "texts", "asked")
        }
        return cls(**found, **counts)

    @property
    def searched(self) -> np.ndarray:
        """(L,) whether the layer has candidates."""
        found: np.ndarray = ~np.isnan(self.change).all(axis=(1, 2))
        return found

    def losses(self) -> dict[str, np.ndarray]:
        """(L, H, C) what dropping keys costs by kind of prompt, nats a token: "text" and "answer",
        where known.

        It is the geometric mean of `change` and the squared first-order change of the loss, on the
        latter's scale: the one knows nothing of what later layers make of it, the other only one
        sample of each token. To text comes the change of its loss, since text that repeats itself
        loses more by what is dropped than the KL says; as an estimate from few tokens it is shrunk
        towards none, and never takes away more than three quarters. Where no gradients are known
        the one kind is "change"."""
        found = {}
        if self.texts:
            both = _geometric(self.change, self.text)
            trust = self.tokens / (self.tokens + _TOKENS_TO_TRUST)
            found["text"] = np.maximum(both + trust * self.drop, both / 4)
        if self.asked:
            found["answer"] = _geometric(self.change, self.answer)
        return found or {"change": self.change}

    def loss(self, weights: Mapping[str, float] | None = None) -> np.ndarray:
        """(L, H, C) the sum of `losses`, weighted by kind; equal weights if None."""
        found = np.zeros_like(self.change)
        for kind, values in self.losses().items():
            found = found + (weights or {}).get(kind, 1.0) * values
        return found


def _geometric(change: np.ndarray, squared: np.ndarray) -> np.ndarray:
    if not np.nansum(squared) > 0:
        return np.where(np.isnan(change), np.nan, 0.0)
    both = np.sqrt(np.maximum(change, 0) * np.maximum(squared, 0))
    found: np.ndarray = both * (np.nansum(squared) / np.nansum(both))
    return found


def _weighted(values: Sequence[np.ndarray], weights: Sequence[int]) -> np.ndarray:
    total = np.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total = total + weight * value
    return total / max(1, sum(weights))
