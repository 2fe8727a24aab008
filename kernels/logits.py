"""Logits of attention: what they are made of and which of them a softmax counts.

One object holds it all and is handed on whole, from a layer of a model to the kernels.

Shapes: H query heads, Q query length, K key length, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kernels.checks import check_tensor
from kernels.index import check_window


@dataclass(frozen=True, eq=False, slots=True)
class Logits:
    """How logits are computed. A call checks them, with its own tensors.

    Attributes:
        scale: factor on the products of queries and keys, D ** -0.5 if None. A scale of float8 keys
            goes in here; one of the values is the caller's to multiply the output by.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them.
        sinks: (H,) a learned logit of each query head that takes part in every softmax and has
            no value (gpt-oss); None for none.
        window: a query sees itself and the window - 1 keys before it; None is all of them.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None

    def check(self, num_heads: int) -> None:
        """Raise ValueError for a number out of its range, or sinks of other heads."""
        for name, factor in (("scale", self.scale), ("softcap", self.softcap)):
            if factor is not None and not 0 < factor < math.inf:
                raise ValueError(f"{name} must be a positive finite number, got {factor}")
        check_window(self.window)
        sinks = self.sinks
        if sinks is None:
            return
        check_tensor("sinks", sinks)
        if sinks.shape != (num_heads,) or not sinks.is_floating_point():
            raise ValueError(
                f"sinks must be floating ({num_heads},), got {sinks.dtype} {tuple(sinks.shape)}"
            )

    def factor(self, head_dim: int) -> float:
        """The scale, or its default."""
        if self.scale is None:
            return head_dim**-0.5
        return float(self.scale)

    def numbers(self, head_dim: int) -> tuple[float, float]:
        """Scale and soft-cap as native code takes them: 0 is no soft-cap."""
        return self.factor(head_dim), self.softcap or 0.0

    @property
    def wide_sinks(self) -> Tensor | None:
        """The sinks in fp32."""
        if self.sinks is None:
            return None
        return self.sinks.float()

    def with_sinks(self, sinks: Tensor | None) -> Self:
        """The same logits of other heads."""
        return replace(self, sinks=sinks)

    def compute(self, q: Tensor, k: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits (..., Q, K) in plain torch, at least in fp32.

        Args:
            q: (..., Q, D).
            k: (..., K, D).
            seen: broadcasts to (..., Q, K), bool: logits are -inf where it is False. The window is
                the caller's to have in it. None sees all.
        """
        logits = wide(q) @ wide(k).transpose(-1, -2) * self.factor(q.shape[-1])
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if seen is None:
            return logits
        return logits.masked_fill(~seen, float("-inf"))


PLAIN = Logits()
"""Of most models: scaled by D ** -0.5, and nothing else."""


def softmax(logits: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities (..., Q, K) and log-sum-exp (..., Q) of logits (..., Q, K).

    Zeros and -inf for a query that sees nothing.

    Args:
        logits: (..., Q, K), -inf where a query does not see a key.
        sinks: broadcasts to (..., Q): the logit of one more key, which has no value. Probabilities
            then sum to less than 1.
    """
    count = logits.shape[-1]
    if sinks is not None:
        column = sinks.to(logits.dtype).expand(logits.shape[:-1])[..., None]
        logits = torch.cat([logits, column], dim=-1)
    lse = logits.logsumexp(-1)
    weights = logits.softmax(-1).masked_fill(lse[..., None] == float("-inf"), 0)
    return weights[..., :count], lse


def wide(x: Tensor) -> Tensor:
    """The tensor in fp32, or in fp64 if it is."""
    if x.dtype == torch.float64:
        return x
    return x.float()
