"""What a policy is: keys and values of some KV heads, what it keeps of them, and attention over that.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, D head dim, E value dim.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from runtime.caches.room import append
from runtime.caches.step import Step

# What a share's product may be above a whole number by rounding: 0.1 of 30 tokens are 3.
_ROUNDING = 1e-6


def tokens(budget: int | float, seen: int) -> int:
    """How many tokens a budget is worth: a count is itself, a share goes by the tokens seen.

    A share is rounded up, so that it grows by no more than one with each token.
    """
    return max(0, math.ceil(budget * seen - _ROUNDING)) if isinstance(budget, float) else budget


class Policy(ABC):
    """Keys and values of some KV heads, for sequences that have seen equally many tokens.

    Every tensor it holds has the batch first and is an attribute of its own: so rows are selected and bytes counted.

    seen: tokens so far, in each sequence.
    """

    def __init__(self) -> None:
        self.seen = 0

    @property
    @abstractmethod
    def kept(self) -> int:
        """Tokens held of each sequence and KV head."""

    @abstractmethod
    def attend(self, call: Step) -> Tensor:
        """Take in the call's tokens and attend to what is kept: (B, H, Q, E)."""

    @abstractmethod
    def truncate(self, length: int) -> bool:
        """Forget all but the first `length` tokens; False, and nothing done, where some of those are gone already."""

    def tensors(self) -> dict[str, Tensor]:
        """What it holds, by attribute."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def state(self) -> dict[str, Tensor | float]:
        """Its tensors, shared, and numbers by attribute: what load_state() needs to go on from here."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor | int | float)}

    def load_state(self, state: dict[str, Tensor | float]) -> None:
        """Become the policy that state() was asked of; the tensors are taken over."""
        for name, value in state.items():
            setattr(self, name, value)

    def mark(self) -> Self:
        """A copy to come back to. Where tokens are only ever added behind others it may share this one's memory."""
        return self.select(torch.arange(next((x.shape[0] for x in self.tensors().values()), 0)))

    def select(self, rows: Tensor) -> Self:
        """A copy that shares no memory, with these sequences, each as often as it is named."""
        made = copy.copy(self)
        for name, tensor in self.tensors().items():
            setattr(made, name, tensor.index_select(0, rows.to(tensor.device)))
        return made


class Full(Policy):
    """Everything is kept, for layers, or KV heads, beside others that drop tokens.

    keys (B, G, n, D) and values (B, G, n, E) of all tokens, with room at the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def kept(self) -> int:
        return self.seen

    def mark(self) -> Self:
        """See Policy.mark."""
        return copy.copy(self)

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        past, total = self.seen, self.seen + call.length
        self.keys, self.values = append(self.keys, call.k, past), append(self.values, call.v, past)
        self.seen = total
        keys, values = self.keys[:, :, :total], self.values[:, :, :total]
        if call.length > 1:
            return call.prefill(call.q, keys, values)
        return call.attend(call.q, keys, values)[0]

    def truncate(self, length: int) -> bool:
        """See Policy.truncate."""
        self.seen = length
        return True
