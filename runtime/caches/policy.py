"""Base of all cache policies: memory of some KV heads, what a call sees of it, and what goes.

Shapes: B batch, H query heads, G KV heads, Q new tokens, K keys, n tokens cached, D head dim, E
value dim.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, is_inference_mode_enabled, nn

from kernels.copies import on_device
from runtime.allocator import in_huge_pages
from runtime.caches.paging import Paging
from runtime.caches.step import Step, View

# Headroom for new tokens in new memory: a minimum, and a fraction of the current size.
_HEADROOM = 256
_FRACTION = 8


def with_headroom(needed: int) -> int:
    """Size of new memory for `needed` tokens, with headroom so that copies are rare."""
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


def write(memory: Tensor, new: Tensor, slots: tuple[int, ...]) -> None:
    """Write new tokens (B, G, Q, ...) from the slot of each sequence on, in place.

    Where the slots differ, Q is 1.
    """
    if len(set(slots)) == 1:
        memory[:, :, slots[0] : slots[0] + new.shape[2]] = new
    else:
        rows = on_device(tuple(range(len(slots))), memory.device)
        memory[rows, :, on_device(slots, memory.device)] = new[:, :, 0]


class Policy(ABC):
    """Keys and values of some KV heads, for the sequences of a batch.

    A policy is a subclass with two rules. `view` takes in a step's tokens (`_add`) and returns the
    keys that its queries see; `update` drops what may go (`_keep`). A step of one token has
    sequences of any lengths (`_ends`); in a step of more tokens all sequences have seen and cached
    equally many. It may also override
    - `maker`, if it is made of more than its record,
    - `steps`, if tokens may go within a call,
    - `size`, if it knows better how much memory it needs,
    - `snapshot`, if `view` overwrites cached tokens,
    - `paging`, if vLLM serves it.
    Two hosts serve policies: PolicyLayer (runtime.caches.layer), the cache layer of transformers,
    handles batches of different lengths, beams, drafts, and KV heads with different policies;
    PagedPolicy (runtime.vllm.policy_host) reads vLLM's pages. Add a new policy to POLICIES
    (runtime.caches.make) and to the conformance suite (tests/conformance/test_cache_policies.py).

    Every tensor is an attribute (B, G, slots, ...) that exists from the first token on: rows are
    selected, bytes counted and tokens dropped by this. No step may copy all of them.

    Attributes:
        record: the policy in the artifact.
        seen: tokens so far, of each sequence.
        cached: tokens cached of each KV head, of each sequence.
        settled: the shortest length that a sequence can be cropped to, since others were dropped.
        keys: (B, G, size, D); the first `cached` slots of a sequence are valid.
        values: (B, G, size, E).
    """

    keys: Tensor
    values: Tensor

    def __init__(self, record: Any = None) -> None:
        self.record = record
        self.start(1)

    def start(self, batch: int) -> Self:
        """Begin with `batch` sequences without tokens."""
        self.seen: tuple[int, ...] = (0,) * batch
        self.cached: tuple[int, ...] = (0,) * batch
        self.settled: tuple[int, ...] = (0,) * batch
        return self

    @classmethod
    def maker(cls, record: Any, model: nn.Module, module: nn.Module) -> Callable[[], Policy]:
        """Function that makes the policy of an artifact's record for an attention layer."""
        return partial(cls, record)

    @classmethod
    def paging(cls, record: Any) -> Paging:
        """How vLLM's pages hold the cached tokens, or the reason why they cannot."""
        return Paging(unsupported_reason="there is no vLLM layer for it")

    def steps(self, call: Step) -> Iterable[Step]:
        """Split a call where tokens may go; each step is served before the next is made."""
        return (call,)

    @abstractmethod
    def view(self, step: Step) -> View:
        """Take in the step's tokens, and return the keys that its queries see."""

    def update(self, step: Step, scores: Tensor | None) -> None:  # noqa: B027
        """Drop what may go after a step.

        Args:
            step: the step.
            scores: sums (B, G, K) of the probabilities of its view's keys, if the view asks for
                them.
        """

    def size(self, needed: int) -> int:
        """Size of new memory, in tokens, where `needed` tokens are cached."""
        return with_headroom(needed)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors held, by attribute."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def select(self, rows: Sequence[int]) -> Self:
        """Copy that shares no memory, with these sequences, each as often as it is named."""
        selected = copy.copy(self)
        for name in ("seen", "cached", "settled"):
            setattr(selected, name, tuple(getattr(self, name)[row] for row in rows))
        index = torch.tensor(list(rows), dtype=torch.long, device="cpu")
        for name, tensor in self.tensors().items():
            setattr(selected, name, tensor.index_select(0, index.to(tensor.device)))
        return selected

    def snapshot(self) -> Self:
        """State before a call, to return to it; `view` writes behind the cached tokens."""
        return copy.copy(self)

    @staticmethod
    def join(policies: Sequence[Policy], places: Sequence[Sequence[int]]) -> Policy:
        """Copy with the sequences of several policies of one group: those of each at its places."""
        joined = copy.copy(policies[0])
        order = sorted(
            (place, policy, row)
            for policy, rows in enumerate(places)
            for row, place in enumerate(rows)
        )
        for name in ("seen", "cached", "settled"):
            lengths = tuple(getattr(policies[policy], name)[row] for _, policy, row in order)
            setattr(joined, name, lengths)
        names = {name for policy in policies for name in policy.tensors()}
        for name in names:
            tensors = [policy.tensors().get(name) for policy in policies]
            # A policy without tokens has none yet.
            held = [tensor for tensor in tensors if tensor is not None]
            size = max(tensor.shape[2] for tensor in held)
            like = held[0]
            memory = in_huge_pages(like.new_empty(len(order), like.shape[1], size, *like.shape[3:]))
            for tensor, rows in zip(tensors, places, strict=True):
                if tensor is not None:
                    index = torch.tensor(list(rows), dtype=torch.long, device=tensor.device)
                    memory[index, :, : tensor.shape[2]] = tensor
            setattr(joined, name, memory)
        return joined

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of each sequence, `settled` or more."""
        lengths = zip(self.cached, self.seen, strict=True)
        self.cached = tuple(cached - (seen - length) for cached, seen in lengths)
        self.seen = (length,) * len(self.seen)

    def _ends(self, device: torch.device) -> Tensor | None:
        """Tokens cached of each sequence (B,) int32; None where they are equally many."""
        if len(set(self.cached)) == 1:
            return None
        return on_device(self.cached, device, torch.int32)

    def _reserve(self, needed: int, **new: Tensor) -> None:
        """Reserve memory for `needed` tokens like `new` (B, G, Q, ...), by attribute."""
        for name, rows in new.items():
            memory = vars(self).get(name, rows[:, :, :0])
            setattr(self, name, grown(memory, max(self.cached), needed, self.size(needed)))

    def _add(self, **new: Tensor) -> list[Tensor]:
        """Append new tokens (B, G, Q, ...) by attribute; returns all tokens (B, G, n + Q, ...).

        n is that of the sequence with the most.
        """
        past = self.cached
        count = new["keys"].shape[2]
        longest = max(past) + count
        self._reserve(longest, **new)
        self.seen = tuple(seen + count for seen in self.seen)
        self.cached = tuple(cached + count for cached in past)
        held = [vars(self)[name][:, :, :longest] for name in new]
        for memory, rows in zip(held, new.values(), strict=True):
            write(memory, rows, past)
        return held

    def _keep(self, slots: Tensor) -> None:
        """Keep the tokens in slots (B, G, n), in new memory: that of all others is freed."""
        count = slots.shape[2]
        self.cached = (count,) * len(self.seen)
        for name, tensor in self.tensors().items():
            index = slots
            if tensor.dim() == 4:
                index = slots[..., None].expand(-1, -1, -1, tensor.shape[3])
            rows = tensor.gather(2, index)
            setattr(self, name, grown(rows, count, count + 1, self.size(count)))
        self.settled = self.seen


class Full(Policy):
    """Every token, in the order of the text: for layers or KV heads next to others that drop."""

    @classmethod
    def paging(cls, record: Any) -> Paging:
        """See Policy.paging."""
        return Paging()

    def view(self, step: Step) -> View:
        """See Policy.view."""
        keys, values = self._add(keys=step.k, values=step.v)
        if step.length > 1:
            return View(keys, values, whole=True)
        return View(keys, values, self._ends(keys.device))
