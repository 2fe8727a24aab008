"""What a cache under policies hands to attention in place of keys and values, most of which it may have dropped.

Shapes: B batch, G KV heads, Q new tokens, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError


class NewTokens(Tensor):
    """Stands for all keys (B, G, slots, D) or values of a layer's cache; has no memory, and cannot be read."""

    # The PolicyLayer that made it.
    layer: Any

    @staticmethod
    def __new__(cls, layer: Any, new: Tensor, slots: int) -> NewTokens:
        shape = (*new.shape[:2], slots, new.shape[3])
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        tensor.layer = layer
        return tensor

    # Only __torch_dispatch__ is wanted: it sees the operations that composite ones come down to.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise HeadwiseError(
            "this cache drops keys and values, and only Headwise's attention can read what it keeps: "
            "apply the artifact to the model (load(cfg).apply(model)) before the cache is used"
        )
