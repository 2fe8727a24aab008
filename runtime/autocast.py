"""torch.autocast around attention: one dtype for queries, keys and values.

Autocast leaves queries and keys in float32, since the rotation does, and values in its own dtype.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_UNCHANGED: AbstractContextManager[None] = nullcontext()


def autocast_on(device: torch.device) -> bool:
    """True where torch.autocast is on for a device."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the dtype in which attention computes; those that have it stay as they are.

    Under autocast it is autocast's, as in torch's scaled_dot_product_attention, which also leaves
    float64 alone. Otherwise it is the smallest dtype of the tensors: queries and keys that a
    rotation has widened return to the dtype of the weights, as in transformers' flash attention.
    """
    first = tensors[0]
    dtype = first.dtype
    alike = True
    for x in tensors:
        if x.dtype != dtype:
            alike = False
            if x.dtype.itemsize < dtype.itemsize:
                dtype = x.dtype
    if autocast_on(first.device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(first.device.type)
    elif alike:
        return tensors
    return tuple(x.to(dtype) for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context in which Headwise's own operations keep their dtypes."""
    if autocast_on(device):
        return torch.autocast(device.type, enabled=False)
    return _UNCHANGED
