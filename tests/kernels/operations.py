"""Counts torch's operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def operations() -> Iterator[list[str]]:
    """Names of torch's operations that are called meanwhile, without views and empty memory."""
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not func.is_view and func.overloadpacket.__name__ != "empty":
                seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Mode():
        yield seen
