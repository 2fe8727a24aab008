"""The way between a context bank in CPU memory and the device that computes: copies, and what waits for which.

Shapes: N rows that are fetched, R numbers in a row, S rows on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch
from torch import Tensor


def lane_to(device: torch.device) -> Lane:
    """The lane between CPU memory and a device."""
    return CudaLane(device) if device.type == "cuda" else Lane(device)


class Lane:
    """Plain copies, each done when its call returns: for a device that is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # What is gathered into takes turns where copies go on behind.
        self._buffers: list[Tensor | None] = [None]
        self._turn = 0

    def __reduce__(self) -> tuple[type[Self], tuple[torch.device]]:
        return type(self), (self.device,)

    def memory(self, nbytes: int) -> Tensor:
        """Memory of a bank: (nbytes,) uint8, of whatever content."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, target: Tensor, rows: Tensor) -> None:
        """Copy rows of the device, as the work given to it so far leaves them, into a bank. Waits for nothing."""
        target.copy_(rows)

    def arrived(self) -> None:
        """Wait until the bank holds all that was sent."""

    def receive(self, target: Tensor, rows: Tensor) -> None:
        """Copy rows of a bank, once they are there, to the device, before all work that is given to it later."""
        target.copy_(rows)

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Bring a small tensor to the host; calling the result waits for it."""
        return lambda: tensor

    def start(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Begin what gathers rows in a bank and calls `deliver`; calling the result waits for it and returns its value.

        Work given to the device after that call sees what was delivered.
        """
        done = work()
        return lambda: done

    def staging(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory (N, R) to gather into: nothing that was gathered there before is still needed."""
        buffer, nbytes = self._buffers[self._turn], rows * width * dtype.itemsize
        if buffer is None or buffer.nbytes < nbytes:
            # Pinned memory is given out in powers of two.
            with torch.inference_mode(False):
                buffer = self._buffers[self._turn] = self.memory(1 << (nbytes - 1).bit_length())
        return buffer.view(dtype)[: rows * width].view(rows, width)

    def deliver(self, staged: Tensor, target: Tensor, places: Tensor) -> None:
        """Copy staged rows (N, R) to the rows `places` (N,) of target (S, R) on the device."""
        target.index_copy_(0, places, staged)

    @property
    def host_bytes(self) -> int:
        """Bytes of CPU memory for staging."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)


class CudaLane(Lane):
    """Copies on streams of their own through pinned memory, behind what the device computes.

    Rows go out on one stream and come in on another. What comes in is gathered by a thread, so that the launches of the
    dense layer next to a filter layer do not wait for the choice to reach the host. Two staging buffers take turns: one
    is gathered into while the other is being copied.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._outward = torch.cuda.Stream(device)
        self._inward = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwise-fetch")
        self._buffers = [None, None]
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]

    def memory(self, nbytes: int) -> Tensor:
        """See Lane.memory; pinned."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, target: Tensor, rows: Tensor) -> None:
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            target.copy_(rows, non_blocking=True)
        # Else the memory could be given to the computation while it is still being copied.
        rows.record_stream(self._outward)

    def arrived(self) -> None:
        self._outward.synchronize()

    def receive(self, target: Tensor, rows: Tensor) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._outward)
        target.copy_(rows, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        # The filter layer may lie on another device: the stream and the event are those of the tensor's.
        with torch.cuda.device(tensor.device):
            found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found.copy_(tensor, non_blocking=True)
            reached = torch.cuda.Event()
            reached.record()

        def wait() -> Tensor:
            reached.synchronize()
            return found

        return wait

    def start(self, work: Callable[[], Any]) -> Callable[[], Any]:
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self.device))
        delivered = torch.cuda.Event()

        def run() -> Any:
            with torch.no_grad(), torch.cuda.device(self.device), torch.cuda.stream(self._inward):
                # Attention of the step before still reads the rows that are about to be replaced.
                self._inward.wait_event(computed)
                done = work()
                delivered.record(self._inward)
            return done

        running = self._thread.submit(run)

        def wait() -> Any:
            done = running.result()
            torch.cuda.current_stream(self.device).wait_event(delivered)
            return done

        return wait

    def staging(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """See Lane.staging; pinned."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        return super().staging(rows, width, dtype)

    def deliver(self, staged: Tensor, target: Tensor, places: Tensor) -> None:
        """See Lane.deliver; on the stream of what comes in."""
        landed = staged.to(self.device, non_blocking=True)
        self._copied[self._turn].record(self._inward)
        target.index_copy_(0, places.pin_memory().to(self.device, non_blocking=True), landed)
        target.record_stream(self._inward)
