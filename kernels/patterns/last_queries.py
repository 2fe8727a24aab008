"""Attention of the last queries, from which vertical-slash selects (MInference 1.0, Algorithm 2).

Shapes: B batch, h heads asked for, H query heads, G KV heads, Q query length, K key length, D head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import registry
from kernels.patterns.paged import Keys


class Masses(NamedTuple):
    """Attention masses of the last queries; each adds up to their number.

    Attributes:
        vertical: (B, h, K) fp32, mass on key j.
        near: (B, h, S) fp32, mass at distance s = query position - key position, or a part of it.
            There is none from S on.
        far: None, or (B, h, S) fp32, the rest of it.
    """

    vertical: Tensor
    near: Tensor
    far: Tensor | None = None

    def slash(self) -> Tensor:
        """(B, h, K) fp32, mass at each distance."""
        if self.far is None:
            return self.near
        slash = torch.zeros_like(self.vertical)
        seen = min(self.near.shape[-1], slash.shape[-1])
        torch.add(self.near[..., :seen], self.far[..., :seen], out=slash[..., :seen])
        return slash


@dataclass(frozen=True, eq=False, slots=True)
class EstimateCall:
    """Attention mass of each column and diagonal from the last queries (Algorithm 2, lines 1-6).

    Attributes:
        q: (B, H, Q, D) queries, the last Q of the K positions.
        k: (B, G, K, D) keys, read where they lie, never repeated for the query heads of a KV head.
        heads: the h query heads asked for.
        last_q: for each of them, by how many last queries; Q if there are no more.
        scale: factor on the logits.
        window: how many keys a query sees, itself included; None for all.
    """

    q: Tensor
    k: Keys
    heads: Sequence[int]
    last_q: Sequence[int]
    _: KW_ONLY
    scale: float
    window: int | None = None

    @property
    def device(self) -> torch.device:
        """Device of the queries."""
        return self.q.device

    @torch.no_grad()
    def run(self, backend: str = "auto") -> Masses:
        """The masses of all heads asked for; the reference is torch."""
        masses: Masses = registry.run("estimate", self, backend)
        return masses
