"""What a cache hands to attention in place of keys and values whose past lies in a context bank.

Shapes: B batch, G KV heads, Q new tokens, K tokens in all, D head dim, E value dim, n tokens,
R = G * (D + E) numbers in a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.standin import StandIn


class Row(NamedTuple):
    """What a token's row is made of in one layer."""

    heads: int
    k_dim: int
    v_dim: int

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Rows (Q, B, R) of keys (B, G, Q, D) and values (B, G, Q, E)."""
        rows = k.new_empty(k.shape[2], k.shape[0], self.heads * (self.k_dim + self.v_dim))
        for part, states in zip(self.unpack(rows), (k, v), strict=True):
            part.copy_(states.detach())
        return rows

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, G, n, D) and values (B, G, n, E) as views of rows (n, B, R)."""
        k, v = rows.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3).split((self.k_dim, self.v_dim), dim=-1)
        return k, v


class Offload:
    """Keys and values of one layer in one call: the past in the bank, the new rows (Q, B, R) on the device."""

    def __init__(self, group: Any, layer: int, past: int, rows: Tensor) -> None:
        """group: the runtime.omnikv.groups.Group that makes this."""
        self.group, self.layer, self.past, self.rows = group, layer, past, rows
        self._read: tuple[Tensor, Tensor] | None = None

    def attended(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """See Group.attended."""
        found: tuple[Tensor, Tensor, Tensor | None] | None = self.group.attended(self.layer, self.past, self.rows)
        return found

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys (B, G, K, D) and values (B, G, K, E), brought to the device; gone when this object is."""
        if self._read is None:
            bank, row, new = self.group.bank, self.group.row, self.rows
            assert bank is not None and row is not None
            whole = new.new_empty(self.past + new.shape[0], *new.shape[1:])
            bank.read(self.layer, self.past, whole)
            whole[self.past :] = new
            self._read = row.unpack(whole)
        return self._read

    def chosen(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, G, n + Q, D) and values of tokens (B, n) of the past, and then of the new ones."""
        row = self.group.row
        assert row is not None
        return row.unpack(torch.cat([self.group.chosen(self.layer, tokens), self.rows]))

    def tensors(self) -> tuple[OffloadedTensor, OffloadedTensor]:
        """Stand-ins for the keys and the values."""
        return OffloadedTensor(self, 0), OffloadedTensor(self, 1)


class OffloadedTensor(StandIn):
    """Keys (B, G, K, D) or values (B, G, K, E) on the device, without memory until they are read.

    Code that reads one as a tensor gets all of it, fetched once a call; Headwise's attention asks for what it needs.
    """

    offload: Offload
    _which: int

    @staticmethod
    def __new__(cls, offload: Offload, which: int) -> OffloadedTensor:
        assert offload.group.row is not None
        row, (new, batch, _) = offload.group.row, offload.rows.shape
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
