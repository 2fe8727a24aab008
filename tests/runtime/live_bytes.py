"""Bytes of tensors that exist at once, counted at each operation: exact, whatever an allocator
keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered, `peak` is the most bytes of tensors made inside that existed at once,
    `largest` the largest one's.

    What native kernels take for themselves is not in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        # What exists, and what has gone since it was last looked at.
        self._at_most = 0
        self.peak = self.largest = 0

    @property
    def now(self) -> int:
        """Bytes that exist now."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self._at_most = sum(size for _, size in self._made.values())
        return self._at_most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)
        }
        result = func(*args, **(kwargs or {}))
        made = [leaf.untyped_storage() for leaf in tree_leaves(result) if _is_plain(leaf)]
        for storage in made:
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._at_most += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        # Looking at everything takes long: it is done where there may be more than ever.
        if self._at_most > self.peak:
            self.peak = max(self.peak, self.now)
        return result


def _is_plain(leaf: object) -> bool:
    """Whether it is a tensor with memory: those that stand for something else are made by other
    operations."""
    return type(leaf) in (torch.Tensor, torch.nn.Parameter)
