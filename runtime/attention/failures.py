"""Failures of kernels: a call is served densely instead, and the reason is counted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TypeVar

import torch

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten
from kernels.registry import CannotBuildError, NoKernelError
from runtime.attention.call import Call
from runtime.autocast import without_autocast

# Messages of torch's allocators that raise a plain RuntimeError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
# Category, and first words of the message, of kernels.registry.NoKernelError.
_NO_KERNEL = "no fast kernel"
_Result = TypeVar("_Result")


def attempt(call: Call, serve: Callable[..., _Result], *more: object) -> _Result | str:
    """Result of serve(call, ...), one of Headwise's kernels, or the reason why it failed.

    A strict application raises that reason.
    """
    try:
        with without_autocast(call.query.device):
            return serve(call, *more)
    except HeadwiseError:
        raise
    except Exception as error:
        why = error_category(error)
        if why is None:
            raise
        call.layer.settings.refuse(why, message(error))
    if call.context is not None:
        # The kernel may serve no more.
        call.context.kernels.clear()
    # Outside the handler the error and its frames are freed: dense attention has their memory.
    return why


def error_category(error: Exception) -> str | None:
    """Return the category of an error of a kernel or an allocator; None for a caller's mistake.

    Calls are counted, and warned of, by these few categories.
    """
    if isinstance(error.__cause__, CannotBuildError):
        # Of a kernel that was selected by its name.
        error = error.__cause__
    if isinstance(error, NoKernelError):
        return _NO_KERNEL
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return "out of memory"
    module = type(error).__module__.partition(".")[0]
    if isinstance(error, RuntimeError | OSError | subprocess.SubprocessError) or module == "triton":
        return f"a kernel failed with {type(error).__name__}"
    return None


def message(error: Exception) -> str:
    """First line of an error's message, without its category."""
    lines = str(error).removeprefix(f"{_NO_KERNEL}: ").strip().splitlines()
    if not lines:
        return "no message"
    return shorten(one_line(lines[0]), 200)[1:-1]
