"""Numbers known on the host as tensors on a device, made once, and a cache of such results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

_Asked = ParamSpec("_Asked")
_Made = TypeVar("_Made")
# Host memory that captured graphs copy from at each replay: theirs for as long as the process runs.
_captured: list[Tensor] = []


@dataclass(frozen=True, eq=False)
class DeviceConstant:
    """A tensor copied to a GPU without waiting, the stream that copies it, and its event.

    Attributes:
        to: the GPU, where the copy was first wanted while a graph was captured: no tensor of that
            graph holds anything before it is replayed, nor after, so that the tensor stays on the
            host and each who asks gets a copy.
    """

    tensor: Tensor
    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None
    to: torch.device | None = None

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.tensor.numel() * self.tensor.element_size()

    @classmethod
    def from_host(cls, tensor: Tensor, device: torch.device) -> DeviceConstant:
        """Start the copy of a tensor in CPU memory to a device."""
        if device.type != "cuda" or not tensor.numel():
            return cls(tensor.to(device))
        pinned = tensor.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            _captured.append(pinned)
            return cls(pinned, to=device)
        stream = torch.cuda.current_stream(device)
        copied = pinned.to(device, non_blocking=True)
        return cls(copied, stream, stream.record_event())

    def read(self) -> Tensor:
        """The tensor, for the current stream; not to be written to, since all who ask share it.

        Another stream than the one that copies it waits for the copy, the host never does.
        """
        if self.to is not None:
            return self.tensor.to(self.to, non_blocking=True)
        if self.event is not None and not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(self.tensor.device)
            if current != self.stream:
                current.wait_event(self.event)
                self.tensor.record_stream(current)
        return self.tensor


@lru_cache(maxsize=4096)
def _copied(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> DeviceConstant:
    with torch.inference_mode(False):
        return DeviceConstant.from_host(torch.tensor(values, dtype=dtype, device="cpu"), device)


def on_device(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers as a 1-D tensor, copied to each device once; not to be written to."""
    return _copied(values, device, dtype).read()


class SizedCache(Generic[_Asked, _Made]):
    """A function of hashable positional arguments that keeps results up to a number of bytes."""

    def __init__(
        self, make: Callable[_Asked, _Made], nbytes: Callable[[_Made], int], max_bytes: int
    ) -> None:
        """Keep results of `make`, `nbytes` each, up to `max_bytes`; the last one stays."""
        self.__wrapped__ = make
        self._nbytes = nbytes
        self._max_bytes = max_bytes
        self._held = 0
        # The one not asked for longest is the first.
        self._made: dict[tuple[object, ...], tuple[_Made, int]] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: _Asked.args, **none: _Asked.kwargs) -> _Made:
        """Return the stored result for these arguments; compute and store it if there is none."""
        with self._lock:
            if (entry := self._made.pop(args, None)) is not None:
                self._made[args] = entry
                return entry[0]
        # Two threads may both compute it, which is no worse than one that waits.
        result = self.__wrapped__(*args, **none)
        size = self._nbytes(result)
        with self._lock:
            self._held -= self._made.pop(args, (result, 0))[1]
            self._made[args] = result, size
            self._held += size
            while self._held > self._max_bytes and len(self._made) > 1:
                self._held -= self._made.pop(next(iter(self._made)))[1]
        return result


def sized_cache(
    nbytes: Callable[[Any], int], max_bytes: int
) -> Callable[[Callable[_Asked, _Made]], SizedCache[_Asked, _Made]]:
    """A decorator: see SizedCache."""
    return lambda make: SizedCache(make, nbytes, max_bytes)


def contiguous(x: Tensor | None) -> Tensor | None:
    """The tensor, copied unless its elements lie in order; None stays None."""
    if x is None:
        return None
    return x.contiguous()


def with_rows(x: Tensor) -> Tensor:
    """The tensor, copied unless its last axis is contiguous."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()
