"""Ctrl-C from a command's first moment, during its imports too: one line and status 130.

The packages that have commands import this before anything else. It does nothing in a process that
is none of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
_OURS = ("artifacts", "profiling", "runtime", "search")


def starts_a_command(arguments: list[str]) -> bool:
    """True for the arguments of `headwise`, or of `python -m` one of our modules."""
    if any(os.path.basename(argument) == "headwise" for argument in arguments[:2]):
        return True
    modules = [after for before, after in pairwise(arguments) if before == "-m"][:1]
    return any(module.split(".")[0] in _OURS for module in modules)


def quit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End the process without a word from what is being imported."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def until_it_runs() -> None:
    """Take Ctrl-C until listen_as_usual(), in a command's process where nobody else takes it."""
    if (
        starts_a_command(sys.orig_argv)
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        with contextlib.suppress(ValueError):
            # Only in the main thread.
            signal.signal(signal.SIGINT, quit_at_once)


def listen_as_usual() -> None:
    """KeyboardInterrupt from now on."""
    if signal.getsignal(signal.SIGINT) is quit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def while_importing() -> Iterator[None]:
    """Take Ctrl-C as before a command runs, for what it imports once its options are checked."""
    until_it_runs()
    try:
        yield
    finally:
        listen_as_usual()


until_it_runs()
