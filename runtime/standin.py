"""Tensors without memory, that stand for what is somewhere else or is made only when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class StandIn(Tensor):
    """A tensor of some shape, dtype and device; whoever reads it as a tensor gets what read() gives."""

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """One without anything to read yet."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def read(self) -> Tensor:
        """What it stands for, as a plain tensor."""
        raise NotImplementedError

    # Only __torch_dispatch__ is wanted: it sees the operations that composite ones come down to.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(StandIn, lambda each: each.read(), (args, kwargs or {}))
        return func(*args, **kwargs)
