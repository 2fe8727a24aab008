"""Numbers known on the host as tensors on a device: made once, and safe to read from any stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Copy:
    """A tensor that is copied to a GPU without waiting: the stream that copies it, and the event that it has been."""

    tensor: Tensor
    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.tensor.numel() * self.tensor.element_size()

    @classmethod
    def of(cls, made: Tensor, device: torch.device) -> Copy:
        """Copy a tensor of the host."""
        if device.type != "cuda":
            return cls(made.to(device))
        stream = torch.cuda.current_stream(device)
        tensor = made.pin_memory().to(device, non_blocking=True)
        # A graph's nodes are in order by themselves.
        event = None if torch.cuda.is_current_stream_capturing() else stream.record_event()
        return cls(tensor, stream, event)

    def read(self) -> Tensor:
        """The tensor, for the current stream; not to be written to, since all who ask share it.

        Another stream than the one that copies it waits for the copy, the host never does.
        """
        if self.event is not None and not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(self.tensor.device)
            if current != self.stream:
                current.wait_event(self.event)
                self.tensor.record_stream(current)
        return self.tensor


@lru_cache(maxsize=4096)
def _copied(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Copy:
    with torch.inference_mode(False):
        return Copy.of(torch.tensor(values, dtype=dtype, device="cpu"), device)


def on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers as a 1-D tensor, copied to each device once; not to be written to."""
    return _copied(values, device, dtype).read()
