"""Count what a prefill and a decode step launch and allocate; as a script it prints JSON.

Our kernels are counted as they are launched, torch's operations as they are called, views left out:
on a GPU each is a launch. Triton interprets ours, so lengths are small.

TRITON_INTERPRET=1 python -m tests.kernels.launches
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention import sparse_attention
from kernels.decode import decode_attention
from kernels.dispatch import BACKENDS
from kernels.patterns import LayerPlan, make

# Kernels that write what nobody reads here.
_UNREAD = (
    "tables_kernel",
    "sparse_attention_kernel",
    "split_kernel",
    "combine_kernel",
    "score_kernel",
    "column_sums_kernel",
)
# What makes the host wait for the device.
_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item")
# Launch nothing: they only look at memory differently, or reserve it.
_FREE = (
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
    """Have Triton's interpreter serve what Triton serves on a GPU, and no native code."""
    with (
        mock.patch("kernels.patterns.cpu.serves", return_value=False),
        mock.patch("kernels.dispatch._by_device", lambda kind: BACKENDS),
    ):
        yield


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts of the calls meanwhile; attention is not computed, since nobody reads it."""
    from triton.runtime import interpreter

    counts = Counts()
    call: Callable[..., None] = interpreter.GridExecutor.__call__
    operations = _Operations(counts)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        counts.ours.append(self.fn.__name__)
        if counts.ours[-1] in _UNREAD:
            return
        # What the interpreter does with tensors is none of the call's.
        with torch.utils._python_dispatch._disable_current_modes():
            call(self, *args, **kwargs)

    with mock.patch.object(interpreter.GridExecutor, "__call__", launch), operations:
        yield counts


LAYER = [
    make("vertical_slash", vertical=80, slash=90),
    make("a_shape", sink=64, window=64),
    make("block_sparse", blocks=2),
    make("dense"),
]
LENGTHS = (128, 320)


def calls(length: int) -> tuple[Counts, Counts]:
    """The first two calls of a plan: by the second what is made once for a length is there."""
    q = torch.randn(1, 4, length, 64, dtype=torch.float16)
    k, v = (torch.randn(1, 2, length, 64, dtype=torch.float16) for _ in range(2))
    plan = LayerPlan(LAYER, 2)
    found = []
    with torch.no_grad(), as_on_gpu():
        for _ in range(2):
            with counting() as counts:
                sparse_attention(q, k, v, plan.build(q, k), backend="triton")
            found.append(counts)
    return found[0], found[1]


def decode(chosen: bool, scores: bool, length: int) -> Counts:
    """One token, over all keys or over 64 chosen ones."""
    q = torch.randn(1, 4, 1, 64, dtype=torch.float16)
    k, v = (torch.randn(1, 2, length, 64, dtype=torch.float16) for _ in range(2))
    tokens = torch.arange(64, dtype=torch.int32).expand(1, 2, 64).contiguous() if chosen else None
    with torch.no_grad(), counting() as counts:
        decode_attention(
            q, k, v, tokens=tokens, scores="sum" if scores else "none", backend="triton"
        )
    return counts


def scored(length: int) -> Counts:
    """Launches of the second half of a prompt with summed probabilities, as H2O takes it in."""
    q = torch.randn(1, 4, length, 64, dtype=torch.float16)
    k, v = (torch.randn(1, 2, length, 64, dtype=torch.float16) for _ in range(2))
    with torch.no_grad():
        with counting():
            decode_attention(q, k, v, scores="sum", backend="triton")
        with counting() as counts:
            decode_attention(q, k, v, scores="sum", backend="triton")
    return counts


def main() -> None:
    """Everything at both lengths."""
    found = {}
    for length in LENGTHS:
        found[f"first, {length}"], found[f"prefill, {length}"] = calls(length)
        found[f"decode, chosen keys, {length}"] = decode(True, False, length)
        found[f"decode, all keys, scores, {length}"] = decode(False, True, length)
        found[f"prompt, scores, {length}"] = scored(length)
    print(json.dumps({name: asdict(counts) for name, counts in found.items()}))


if __name__ == "__main__":
    main()
