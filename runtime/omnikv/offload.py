"""What a cache hands to attention in place of keys and values whose past lies in a context bank.

Shapes: B batch, G KV heads, Q new tokens, K tokens in all, D head dim, E value dim, n tokens,
R = G * (D + E) numbers in a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.standin import StandIn


class Offload:
    """Keys and values of one layer in one call: the past in the bank, the new rows (Q, B, R) on the device."""

    def __init__(self, group: Any, layer: int, past: int, rows: Tensor) -> None:
        """group: the runtime.omnikv.groups.Group that makes this."""
        self.group, self.layer, self.past, self.rows = group, layer, past, rows
        self._read: tuple[Tensor, Tensor] | None = None

    def attended(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """See Group.attended."""
        return self.group.attended(self.layer, self.past, self.rows)

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys (B, G, K, D) and values (B, G, K, E), brought to the device; gone when this object is."""
        if self._read is None:
            bank, new = self.group.bank, self.rows
            whole = new.new_empty(self.past + new.shape[0], *new.shape[1:])
            bank.read(self.layer, self.past, whole)
            whole[self.past :] = new
            self._read = bank.row.unpack(whole)
        return self._read

    def chosen(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, G, n + Q, D) and values of tokens (B, n) of the past, and then of the new ones."""
        rows = torch.cat([self.group.chosen(self.layer, tokens), self.rows])
        k, v = self.group.bank.row.unpack(rows)
        return k, v


class OffloadedTensor(StandIn):
    """Keys (B, G, K, D) or values (B, G, K, E) on the device, without memory until they are read.

    Code that reads one as a tensor gets all of it, fetched once a call; Headwise's attention asks for what it needs.
    """

    offload: Offload
    _which: int

    @staticmethod
    def __new__(cls, offload: Offload, which: int) -> OffloadedTensor:
        row, (new, batch, _) = offload.group.bank.row, offload.rows.shape
        shape = (batch, row.heads, offload.past + new, row[1 + which])
        tensor = cls.of(shape, offload.rows.dtype, offload.rows.device)
        tensor.offload, tensor._which = offload, which
        return tensor

    def read(self) -> Tensor:
        """All of it as a plain tensor."""
        return self.offload.read()[self._which]


def fetched(tensor: Tensor) -> Tensor:
    """Keys or values as a plain tensor, fetched where they are offloaded."""
    return tensor.read() if isinstance(tensor, OffloadedTensor) else tensor
