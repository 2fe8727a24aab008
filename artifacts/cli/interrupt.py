"""Handling of Ctrl-C during a command's imports: one line and status 130.

Imported code may swallow a KeyboardInterrupt or turn it into another error.
"""

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


def starts_a_command(arguments: list[str]) -> bool:
    """True for the arguments of `headwise`, or of `python -m headwise`."""
    if any(os.path.basename(argument) == "headwise" for argument in arguments[:2]):
        return True
    return ("-m", "headwise") in pairwise(arguments)


def quit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler that ends the process with one line."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def while_importing() -> Iterator[None]:
    """End the process on Ctrl-C, in a command's process without another SIGINT handler."""
    default_handler = signal.default_int_handler
    if (
        not starts_a_command(sys.orig_argv)
        or signal.getsignal(signal.SIGINT) is not default_handler
    ):
        yield
        return
    with contextlib.suppress(ValueError):
        # Only the main thread may set a signal handler.
        signal.signal(signal.SIGINT, quit_at_once)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is quit_at_once:
            signal.signal(signal.SIGINT, default_handler)
