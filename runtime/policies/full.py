"""Everything is kept, with room at the end: for layers, or KV heads, beside others that drop tokens.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, D head dim, E value dim.
"""

from __future__ import annotations

from torch import Tensor

from runtime.policies.base import Call, Policy, with_room


class Full(Policy):
    """Keys (B, G, n, D) and values (B, G, n, E) of all tokens, with room at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def kept(self) -> int:
        return self.seen

    def attend(self, call: Call) -> Tensor:
        """See Policy.attend."""
        past, total = self.seen, self.seen + call.length
        self.keys = with_room(self.keys, call.k, past, total)
        self.values = with_room(self.values, call.v, past, total)
        self.keys[:, :, past:total] = call.k
        self.values[:, :, past:total] = call.v
        self.seen = total
        keys, values = self.keys[:, :, :total], self.values[:, :, :total]
        if call.length > 1:
            return call.prefill(call.q, keys, values)
        return call.attend(call.q, keys, values)[0]

    def truncate(self, length: int) -> bool:
        """See Policy.truncate."""
        self.seen = length
        return True
