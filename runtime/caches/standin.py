"""What a cache under policies hands to attention in place of keys and values, most of which it may have dropped.

Shapes: B batch, G KV heads, Q new tokens, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from artifacts import HeadwiseError
from runtime.standin import StandIn


class NewTokens(StandIn):
    """Stands for all keys (B, G, slots, D) or values of a layer's cache, and cannot be read."""

    # The PolicyLayer that made it.
    layer: Any

    @staticmethod
    def __new__(cls, layer: Any, new: Tensor, slots: int) -> NewTokens:
        tensor = cls.of((*new.shape[:2], slots, new.shape[3]), new.dtype, new.device)
        tensor.layer = layer
        return tensor

    def read(self) -> Tensor:
        """Raises HeadwiseError."""
        raise HeadwiseError(
            "this cache drops keys and values, and only Headwise's attention can read what it keeps: "
            "apply the artifact to the model (load(cfg).apply(model)) before the cache is used"
        )
