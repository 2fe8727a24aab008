"""Copies between a context bank in CPU memory and the device, and their order.

Shapes: N fetched rows, R numbers in a row, S rows on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch
from torch import Tensor


class CopyEngine:
    """Copies of one bank: plain ones for a CPU, asynchronous ones for a GPU.

    For a GPU memory is pinned, and rows go out on one stream and come in on another. A thread
    gathers fetched rows, so that the launches of the layer after a filter layer do not wait for the
    selection to reach the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        # Staging memory: fetched rows are gathered here.
        self.buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._cuda:
            self._outward = torch.cuda.Stream(device)
            self._inward = torch.cuda.Stream(device)
            self._copied = torch.cuda.Event()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwise-fetch")

    def __reduce__(self) -> tuple[type[Self], tuple[torch.device]]:
        return type(self), (self.device,)

    def memory(self, nbytes: int) -> Tensor:
        """Uninitialised memory of a bank: (nbytes,) uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda, device="cpu")

    def write(self, target: Tensor, rows: Tensor) -> None:
        """Copy rows of the device into a bank, after the work queued so far; waits for nothing."""
        if not self._cuda:
            target.copy_(rows)
            return
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            target.copy_(rows, non_blocking=True)
        # Otherwise the allocator could reuse the memory while it is still being copied.
        rows.record_stream(self._outward)

    def synchronize(self) -> None:
        """Wait on the host until the bank holds all rows sent."""
        if self._cuda:
            self._outward.synchronize()

    def wait_writes(self) -> None:
        """Order later copies to the device behind all rows sent."""
        if self._cuda:
            torch.cuda.current_stream(self.device).wait_stream(self._outward)

    def start(self, tokens: Tensor, gather: Callable[[Tensor], Any]) -> Callable[[], Any]:
        """Start gather(tokens on the host), which calls `deliver`.

        Returns a function that waits and returns gather's value. Work queued on the device after
        that call sees the delivered rows.
        """
        if not self._cuda:
            result = gather(tokens.cpu())
            return lambda: result
        # The filter layer may lie on another device: stream and event are its tokens'.
        with torch.cuda.device(tokens.device):
            listed = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True, device="cpu")
            listed.copy_(tokens, non_blocking=True)
            reached = torch.cuda.Event()
            reached.record()
        # Attention of the step before still reads the rows that are about to be replaced.
        self._inward.wait_stream(torch.cuda.current_stream(self.device))

        def run() -> Any:
            reached.synchronize()
            with torch.no_grad(), torch.cuda.device(self.device), torch.cuda.stream(self._inward):
                return gather(listed)

        running = self._thread.submit(run)

        def wait() -> Any:
            done = running.result()
            torch.cuda.current_stream(self.device).wait_stream(self._inward)
            return done

        return wait

    def staging(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Staging memory (N, R): waits until rows gathered there before are delivered."""
        if self._cuda:
            self._copied.synchronize()
        nbytes = rows * width * dtype.itemsize
        if self.buffer.nbytes < nbytes:
            # Pinned memory is allocated in powers of two.
            with torch.inference_mode(False):
                self.buffer = self.memory(1 << (nbytes - 1).bit_length())
        return self.buffer.view(dtype)[: rows * width].view(rows, width)

    def deliver(self, staged: Tensor, target: Tensor, places: Tensor) -> None:
        """Copy staged rows (N, R) to the rows `places` (N,) of target (S, R) on the device."""
        if not self._cuda:
            target.index_copy_(0, places, staged)
            return
        landed = staged.to(self.device, non_blocking=True)
        self._copied.record(self._inward)
        target.index_copy_(0, places.pin_memory().to(self.device, non_blocking=True), landed)
        target.record_stream(self._inward)
