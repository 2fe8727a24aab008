"""What a policy is: keys and values of some KV heads, what it keeps of them, and attention over
that.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, D head dim, E value dim.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from torch import Tensor

from runtime.caches.room import room_for, with_room
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

    Every tensor it holds is (B, G, slots, ...) and an attribute of its own, there from the first
    token on: so rows are selected, bytes counted and tokens dropped.

    seen: tokens so far, in each sequence. kept: those held of each sequence and KV head. settled:
    the fewest that it can be taken back to, for others were dropped since. keys (B, G, room, D) and
    values (B, G, room, E): the first n slots hold tokens."""

    keys: Tensor
    values: Tensor
    # Whether KV heads of a layer may have records of their own in vLLM, whose pages hold them all.
    by_head_in_vllm: ClassVar[bool] = False

    def __init__(self) -> None:
        self.seen = self.kept = self.settled = 0

    @classmethod
    def why_not_in_vllm(cls, record: Any) -> str | None:
        """Reason why vLLM's paged cache cannot keep what a record says; None where it can."""
        return None

    @abstractmethod
    def attend(self, call: Step) -> Tensor:
        """Take in the call's tokens and attend to what is kept: (B, H, Q, E)."""

    def room(self, needed: int) -> int:
        """For how many tokens memory is made where `needed` are kept."""
        return room_for(needed)

    def tensors(self) -> dict[str, Tensor]:
        """What it holds, by attribute."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def select(self, rows: Tensor) -> Self:
        """A copy that shares no memory, with these sequences, each as often as it is named."""
        made = copy.copy(self)
        for name, tensor in self.tensors().items():
            setattr(made, name, tensor.index_select(0, rows.to(tensor.device)))
        return made

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, `settled` or more."""
        self.kept -= self.seen - length
        self.seen = length

    def _make_room(self, needed: int, **new: Tensor) -> None:
        """Have memory for so many tokens of what is like `new` (B, G, Q, ...), by attribute."""
        for name, rows in new.items():
            memory = vars(self).get(name, rows[:, :, :0])
            setattr(self, name, with_room(memory, self.kept, needed, self.room(needed)))

    def _add(self, **new: Tensor) -> list[Tensor]:
        """Put new tokens (B, G, Q, ...) behind those that are kept, by attribute: all of them, (B,
        G, n + Q, ...)."""
        past = self.kept
        count = new["keys"].shape[2]
        self._make_room(past + count, **new)
        self.seen = self.seen + count
        self.kept = past + count
        held = [vars(self)[name][:, :, : self.kept] for name in new]
        for memory, rows in zip(held, new.values(), strict=True):
            memory[:, :, past:] = rows
        return held

    def _keep(self, slots: Tensor) -> None:
        """Keep the tokens in these slots, (B, G, n), in new memory: that of all others is freed."""
        self.kept = slots.shape[2]
        for name, tensor in self.tensors().items():
            at = (
                slots if tensor.dim() == 3 else slots[..., None].expand(-1, -1, -1, tensor.shape[3])
            )
            setattr(
                self,
                name,
                with_room(tensor.gather(2, at), self.kept, self.kept + 1, self.room(self.kept)),
            )
        self.settled = self.seen


class Full(Policy):
    """Everything is kept, in the order of the text, for layers or KV heads beside others that drop
    tokens."""

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        keys, values = self._add(keys=call.k, values=call.v)
        return (
            call.attend(call.q, keys, values)[0]
            if call.length == 1
            else call.prefill(call.q, keys, values)
        )
