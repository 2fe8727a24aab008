"""Base of all cache policies: memory of some KV heads, and the new tokens of one call.

Shapes: B batch, H query heads, G KV heads, Q new tokens, K keys, n tokens kept, D head dim, E value
dim.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from torch import Tensor, is_inference_mode_enabled, nn

from kernels.dense import dense_attention
from runtime.allocator import in_huge_pages

# Headroom for new tokens in new memory: at least so many, and a fraction of what is needed now.
_HEADROOM = 256
_FRACTION = 8
# Rounding error of a fraction's product: 0.1 of 30 tokens are 3, not 4.
_ROUNDING = 1e-6


def tokens(budget: int | float, seen: int) -> int:
    """Tokens that a budget allows: a count is itself, a float is a fraction of the tokens seen.

    A fraction is rounded up, so that it grows by no more than one with each token.
    """
    if isinstance(budget, float):
        return max(0, math.ceil(budget * seen - _ROUNDING))
    return budget


def with_headroom(needed: int) -> int:
    """Size of new memory for `needed` tokens: enough headroom to make the copy worth it."""
    return needed + max(_HEADROOM, needed // _FRACTION)


def grown(memory: Tensor, used: int, needed: int, size: int) -> Tensor:
    """Memory (B, G, at least `needed`, ...), the same where it suffices.

    Otherwise new memory of `size` tokens, with the first `used` tokens copied over.
    """
    # A tensor made in inference mode cannot be written to outside of it.
    writable = is_inference_mode_enabled() or not memory.is_inference()
    if memory.shape[2] >= needed and writable:
        return memory
    new = in_huge_pages(memory.new_empty(*memory.shape[:2], size, *memory.shape[3:]))
    new[:, :, :used] = memory[:, :, :used]
    return new


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """New tokens of one call, for some KV heads of sequences without padding.

    q (B, H, Q, D), k (B, G, Q, D), v (B, G, Q, E): rotated by the model. prefill(q, k, v): the
    layer's attention (B, H, Q, E) of the last queries of a text over all of its keys, by the
    artifact's patterns where they serve; that of a whole layer also takes `heads`, the KV heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    backend: str
    prefill: Callable[..., Tensor]

    @property
    def length(self) -> int:
        """New tokens, Q."""
        return self.q.shape[2]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every kernel."""
        return {"scale": self.scale, "softcap": self.softcap, "backend": self.backend}

    def slots(self, begin: int, end: int, rows: Tensor | None = None) -> Step:
        """Tokens begin to end of these sequences, or of all."""
        if rows is None and end - begin == self.length:
            return self
        states = [self.q, self.k, self.v]
        if rows is not None:
            states = [x.index_select(0, rows) for x in states]
        q, k, v = (x[:, :, begin:end] for x in states)
        return replace(self, q=q, k=k, v=v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the last queries of keys: out (B, H, Q, E) and lse (B, H, Q)."""
        return dense_attention(q, k, v, window=window, **self.options)


class Policy(ABC):
    """Keys and values of some KV heads, for sequences that have seen equally many tokens.

    A policy is a subclass with one rule, in `attend`: take in the call's tokens (`_add`), attend to
    what is kept, drop the rest (`_keep`). It may also give
    - `maker`, if it is made of more than its record,
    - `size`, if it can say better how much memory it needs,
    - `why_not_in_vllm`, if vLLM serves it (runtime.vllm.keep lists how).
    Batches of unlike lengths, beams, drafts and KV heads of unlike policies are PolicyLayer's.
    A new policy also stands in POLICIES (runtime.caches.make) and in the list of the conformance
    suite (tests/conformance/test_cache_policies.py).

    Every tensor is an attribute (B, G, slots, ...) that exists from the first token on: rows are
    selected, bytes counted and tokens dropped by this. No step may copy all of them.

    Attributes:
        record: the policy in the artifact.
        seen: tokens so far, in each sequence.
        kept: tokens held of each sequence and KV head.
        settled: the shortest length that it can be cropped to, since others were dropped.
        keys: (B, G, size, D), of which the first `kept` slots are valid.
        values: (B, G, size, E), of which the first `kept` slots are valid.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, record: Any = None) -> None:
        self.record = record
        self.seen = 0
        self.kept = 0
        self.settled = 0

    @classmethod
    def maker(cls, record: Any, model: nn.Module, module: nn.Module) -> Callable[[], Policy]:
        """Function that makes the policy of an artifact's record for an attention layer."""
        return partial(cls, record)

    @classmethod
    def why_not_in_vllm(cls, record: Any) -> str | None:
        """Reason why vLLM's paged cache cannot hold what this record keeps, None if it can."""
        return "there is no vLLM layer for it"

    @abstractmethod
    def attend(self, call: Step) -> Tensor:
        """Take in the call's tokens and attend to what is kept: (B, H, Q, E)."""

    def size(self, needed: int) -> int:
        """Size of new memory, in tokens, where `needed` tokens are kept."""
        return with_headroom(needed)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors held, by attribute."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def select(self, rows: Tensor) -> Self:
        """Copy that shares no memory, with these sequences, each as often as it is named."""
        selected = copy.copy(self)
        for name, tensor in self.tensors().items():
            setattr(selected, name, tensor.index_select(0, rows.to(tensor.device)))
        return selected

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, `settled` or more."""
        self.kept -= self.seen - length
        self.seen = length

    def _reserve(self, needed: int, **new: Tensor) -> None:
        """Reserve memory for `needed` tokens like `new` (B, G, Q, ...), by attribute."""
        for name, rows in new.items():
            memory = vars(self).get(name, rows[:, :, :0])
            setattr(self, name, grown(memory, self.kept, needed, self.size(needed)))

    def _add(self, **new: Tensor) -> list[Tensor]:
        """Append new tokens (B, G, Q, ...) by attribute; returns all tokens (B, G, n + Q, ...)."""
        past = self.kept
        count = new["keys"].shape[2]
        self._reserve(past + count, **new)
        self.seen += count
        self.kept += count
        held = [vars(self)[name][:, :, : self.kept] for name in new]
        for memory, rows in zip(held, new.values(), strict=True):
            memory[:, :, past:] = rows
        return held

    def _keep(self, slots: Tensor) -> None:
        """Keep the tokens in slots (B, G, n), in new memory: that of all others is freed."""
        self.kept = slots.shape[2]
        for name, tensor in self.tensors().items():
            index = slots
            if tensor.dim() == 4:
                index = slots[..., None].expand(-1, -1, -1, tensor.shape[3])
            rows = tensor.gather(2, index)
            setattr(self, name, grown(rows, self.kept, self.kept + 1, self.size(self.kept)))
        self.settled = self.seen


class Full(Policy):
    """Every token, in the order of the text: for layers or KV heads next to others that drop."""

    @classmethod
    def why_not_in_vllm(cls, record: Any) -> str | None:
        """See Policy.why_not_in_vllm."""
        return None

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        keys, values = self._add(keys=call.k, values=call.v)
        if call.length > 1:
            return call.prefill(call.q, keys, values)
        return call.attend(call.q, keys, values)[0]
