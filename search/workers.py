"""--workers N: a command starts copies of itself, which share its work through the storage and end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from tqdm import tqdm

from artifacts import HeadwiseError
from artifacts.command_line import INTERRUPTED
from artifacts.errors import one_line

# Set in the copies: which of them this is, and who started it.
_MARK = "HEADWISE_WORKER"
_THREADS = "OMP_NUM_THREADS"
_SECONDS_TO_END = 5.0


def is_worker() -> bool:
    """Whether this process is a copy: it works, and leaves --fresh, the report and the artifact to the first one."""
    return _MARK in os.environ


def check_starter() -> None:
    """End a copy whose first process is gone.

    Raises:
        HeadwiseError: it is.
    """
    if is_worker() and os.getppid() != int(os.environ[_MARK].split(":")[1]):
        raise HeadwiseError("the process that started this worker is gone")


def threads_for(count: int) -> int:
    """Processor threads for each of `count` processes; never more than OMP_NUM_THREADS says."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get(_THREADS, "").split(",")[0]
    share = max(1, cores // count)
    return min(share, int(told)) if told.isdecimal() and int(told) > 0 else share


@contextlib.contextmanager
def workers(count: int, module: str, argv: Sequence[str]) -> Iterator[None]:
    """Run `count` - 1 copies of `python -m module argv` beside this process until the block ends.

    In a copy, and for one worker, nothing is started. The processor's threads are split evenly. What a copy has left
    to do when the block ends is not waited for: leave it when all work is done.

    Raises:
        HeadwiseError: `count` is less than 1.
    """
    if count < 1:
        raise HeadwiseError(f"--workers must be at least 1, got {count}")
    if is_worker() or count == 1:
        yield
        return
    import torch

    before, threads = torch.get_num_threads(), threads_for(count)
    torch.set_num_threads(threads)
    try:
        with contextlib.ExitStack() as stack:
            for number in range(2, count + 1):
                stack.enter_context(_Copy(number, count, [sys.executable, "-m", module, *argv], threads))
            yield
    finally:
        torch.set_num_threads(before)


class _Copy:
    """One copy. What it says goes to a file, of which its last line is told if it dies."""

    def __init__(self, number: int, count: int, command: list[str], threads: int) -> None:
        self._name = f"worker {number} of {count}"
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the copy has ended
        self._ending = False
        environment = {**os.environ, _MARK: f"{number}:{os.getpid()}", _THREADS: str(threads)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._said
        )
        self._watch = threading.Thread(target=self._report, name=self._name, daemon=True)

    def __enter__(self) -> None:
        self._watch.start()

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._process.terminate()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watch.join()
        self._said.close()

    def _report(self) -> None:
        code = self._process.wait()
        # A Ctrl-C reaches the copies too.
        if self._ending or code in (0, INTERRUPTED, -signal.SIGINT):
            return
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        last = f": {one_line(lines[-1])}" if lines else ""
        tqdm.write(f"{self._name} (process {self._process.pid}) {how}; the others go on{last}", sys.stderr)
