"""How often a layer's prefill or a decode step launches something, and what it allocates: counted without a GPU.

Our kernels are counted as they are launched, torch's operations as they are called, views left out: on a GPU each is a
launch. Triton interprets ours (TRITON_INTERPRET=1), so lengths are small. Counts do not depend on them but for two
things. Heads that list tiles score as many rows at a time as 256 MiB have room for, each time by a product and a
choice: all at once up to 92K tokens where 32 heads list, up to 262K where four do, and in 16 turns four heads' 1M. And
the first call of a length lays out on the host what all later ones share, with operations that are counted here, too,
though on a GPU they launch nothing but its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.dispatch import BACKENDS

# What makes the host wait for the device.
_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item")
# Launch nothing: they only look at memory differently, or reserve it.
_FREE = ("detach", "empty", "empty_like", "empty_strided", "new_empty", "alias", "lift_fresh", "set_", "resize_")


@dataclass(kw_only=True)
class Counts:
    """What one call did; largest: bytes of the largest tensor that it made."""

    ours: list[str] = field(default_factory=list)
    torch: int = 0
    waits: list[str] = field(default_factory=list)
    largest: int = 0


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _WAITS:
            self.counts.waits.append(name)
        if not func.is_view and name not in _FREE:
            self.counts.torch += 1
        if not func.is_view:
            for x in found if isinstance(found, tuple | list) else (found,):
                if isinstance(x, Tensor):
                    self.counts.largest = max(self.counts.largest, x.numel() * x.element_size())
        return found


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Triton's interpreter does all that Triton does on a GPU, and native code for the CPU nothing of it."""
    with (
        mock.patch("kernels.patterns.cpu.serves", return_value=False),
        mock.patch("kernels.dispatch._by_device", lambda kind: BACKENDS),
    ):
        yield


@contextmanager
def counting(*, run: bool = True) -> Iterator[Counts]:
    """Counts of all that is called meanwhile.

    Without `run` our kernels do nothing: for calls of which nobody reads what they write.
    """
    from triton.runtime import interpreter

    counts = Counts()
    call: Callable[..., None] = interpreter.GridExecutor.__call__
    operations = _Operations(counts)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        counts.ours.append(self.fn.__name__)
        if not run:
            return
        # What the interpreter does with tensors is none of the call's.
        with torch.utils._python_dispatch._disable_current_modes():
            call(self, *args, **kwargs)

    with mock.patch.object(interpreter.GridExecutor, "__call__", launch), operations:
        yield counts
