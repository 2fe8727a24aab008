"""Runs a model, without a cache, with the attention of a policy written down from its paper, one KV
head at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

# (queries (m, n, D) of a KV head's query heads, keys (n, D), values (n, E), scale) -> (m, n, E)
OneHead = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@contextmanager
def attending(model: Any, one_head: OneHead) -> Iterator[None]:
    """All attention of the model by `one_head`, over whole sequences of tokens that are all
    real."""

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> Any:
        grouped = q.float().unflatten(1, (k.shape[1], -1))
        out = [
            torch.stack(
                [
                    one_head(grouped[b, g], k[b, g].float(), v[b, g].float(), scaling)
                    for g in range(k.shape[1])
                ]
            )
            for b in range(q.shape[0])
        ]
        return torch.stack(out).flatten(1, 2).transpose(1, 2).to(q.dtype).contiguous(), None

    AttentionInterface.register("policy_oracle", attention)
    former = model.config._attn_implementation
    model.config._attn_implementation = "policy_oracle"
    try:
        yield
    finally:
        model.config._attn_implementation = former


def calls(n: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The same chunks of n tokens as feeding.fed makes of `sizes`."""
    at, left = 0, list(sizes)
    while at < n:
        end = min(at + (left.pop(0) if len(left) > 1 else left[0]), n)
        yield at, end
        at = end


def probabilities(q: Tensor, k: Tensor, at: list[int], scale: float) -> Tensor:
    """(m, len(at)) of one token's queries (m, D) over the keys (n, D) at these places."""
    return (q @ k[at].T * scale).softmax(-1)
