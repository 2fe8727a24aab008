"""Copies between a context bank in CPU memory and the device, and their order.

Shapes: N fetched rows, R numbers in a row, S rows on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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

    def submit(self, execute: Callable[..., Any], tokens: Tensor, *request: Any) -> Future[Any]:
        """Start execute(tokens on the host, *request), which calls `deliver`; `wait` ends it."""
        if not self._cuda:
            done: Future[Any] = Future()
            done.set_result(execute(tokens.cpu(), *request))
            return done
        # The filter layer may lie on another device: stream and event are its tokens'.
        with torch.cuda.device(tokens.device):
            listed = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True, device="cpu")
            listed.copy_(tokens, non_blocking=True)
            reached = torch.cuda.Event()
            reached.record()
        # Attention of the step before still reads the rows that are about to be replaced.
        self._inward.wait_stream(torch.cuda.current_stream(self.device))
        return self._thread.submit(self._run, execute, reached, listed, request)

    def _run(
        self, execute: Callable[..., Any], reached: Any, tokens: Tensor, request: tuple[Any, ...]
    ) -> Any:
        """Wait until the tokens are on the host, and execute a request on the inward stream."""
        reached.synchronize()
        with torch.no_grad(), torch.cuda.device(self.device), torch.cuda.stream(self._inward):
            return execute(tokens, *request)

    def wait(self, running: Future[Any]) -> Any:
        """Wait for a request: its value. Work queued on the device then sees delivered rows."""
        value = running.result()
        if self._cuda:
            torch.cuda.current_stream(self.device).wait_stream(self._inward)
        return value

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
