"""Numbers known on the host as tensors on a device: made once, and safe to read from any stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Host memory that captured graphs copy from at each replay: theirs for as long as the process runs.
_captured: list[Tensor] = []


@dataclass(frozen=True, eq=False)
class Copy:
    """A tensor copied to a GPU without waiting, the stream that copies it, and its event.

    to: the GPU, where the copy was first wanted while a graph was captured: no tensor of that graph
    holds anything before it is replayed, nor after, so that the tensor stays on the host and each
    who asks gets a copy."""

    tensor: Tensor
    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None
    to: torch.device | None = None

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.tensor.numel() * self.tensor.element_size()

    @classmethod
    def of(cls, made: Tensor, device: torch.device) -> Copy:
        """Copy a tensor of the host."""
        if device.type != "cuda":
            return cls(made.to(device))
        pinned = made.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            _captured.append(pinned)
            return cls(pinned, to=device)
        stream = torch.cuda.current_stream(device)
        tensor = pinned.to(device, non_blocking=True)
        return cls(tensor, stream, stream.record_event())

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
def _copied(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Copy:
    with torch.inference_mode(False):
        return Copy.of(torch.tensor(values, dtype=dtype, device="cpu"), device)


def on_device(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers as a 1-D tensor, copied to each device once; not to be written to."""
    return _copied(values, device, dtype).read()
