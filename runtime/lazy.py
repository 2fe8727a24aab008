"""Tensors without memory, in place of data that is elsewhere, dropped, or made when read.

Shapes: B batch, G KV heads, Q new tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from artifacts import HeadwiseError


class LazyTensor(Tensor):
    """Tensor of some shape, dtype and device; code that reads it as a tensor gets read()."""

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """Make one without anything to read yet."""
        tensor: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return tensor

    def read(self) -> Tensor:
        """Return the data as a plain tensor."""
        raise NotImplementedError

    # __torch_dispatch__ suffices: it sees the operations of which composite ones consist.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(LazyTensor, lambda each: each.read(), (args, kwargs or {}))
        return func(*args, **kwargs)


class MisfitError(HeadwiseError):
    """A model uses keys and values in a way that no cache that drops tokens can serve."""


class UnreadableError(MisfitError):
    """Keys or values were read outside Headwise's attention.

    Attributes:
        layer: the PolicyLayer that holds them.
    """

    def __init__(self, message: str, layer: Any) -> None:
        super().__init__(message)
        self.layer = layer


class NewTokens(LazyTensor):
    """Keys (B, G, slots, D) or values of a cache that drops tokens; they cannot be read.

    Attributes:
        layer: the PolicyLayer that made it.
    """

    layer: Any

    @staticmethod
    def __new__(cls, layer: Any, new: Tensor, slots: int) -> NewTokens:
        """Make the tensor without its elements; see LazyTensor.empty."""
        tensor = cls.empty((*new.shape[:2], slots, new.shape[3]), new.dtype, new.device)
        tensor.layer = layer
        return tensor

    def read(self) -> Tensor:
        """Raise UnreadableError."""
        raise UnreadableError(
            "this cache drops keys and values, and only Headwise's attention can read it: apply "
            "the artifact to the model (load(cfg).apply(model)) before the cache is used; if "
            "set_attn_implementation() has ended an application, call headwise.undo(model) first",
            self.layer,
        )
