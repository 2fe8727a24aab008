"""Counts torch's operations, and the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What makes the host wait for the device.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item")
# Launch nothing: they only look at memory differently, or reserve it.
FREE = (
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "alias",
    "lift_fresh",
    "set_",
    "resize_",
)


@dataclass(kw_only=True)
class Counts:
    """Counts of one call; largest: bytes of the largest tensor that it made."""

    ours: list[str] = field(default_factory=list)
    torch: int = 0
    waits: list[str] = field(default_factory=list)
    largest: int = 0


class Operations(TorchDispatchMode):
    """Counts torch's operations, and what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.is_view:
            return found
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.counts.waits.append(name)
        if name not in FREE:
            self.counts.torch += 1
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, Tensor):
                self.counts.largest = max(self.counts.largest, x.numel() * x.element_size())
        return found
