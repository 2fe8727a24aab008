"""What goes wrong inside a kernel through no fault of the call: that one is served densely, and the next as ever."""

from __future__ import annotations

import subprocess

import torch

from artifacts.errors import one_line, shorten

# What the allocators of torch say where they raise no error of their own.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


def fault(error: Exception) -> str | None:
    """What to call an error of a kernel or of the memory that it wanted; None where it is somebody's mistake.

    The words are few, however much the messages differ: they are what is counted and said once.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return "out of memory"
    module = type(error).__module__.partition(".")[0]
    if isinstance(error, RuntimeError | OSError | subprocess.SubprocessError) or module == "triton":
        return f"a kernel failed with {type(error).__name__}"
    return None


def message(error: Exception) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return shorten(one_line(lines[0]), 200)[1:-1] if lines else "no message"
