"""Kernels that this machine cannot build: each is tried once, and the reason remembered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_failed: dict[tuple[object, ...], str] = {}


class CannotBuildError(RuntimeError):
    """A kernel that cannot be compiled or does not fit the device; another has to serve."""


def failure(*kernel: object) -> str | None:
    """The reason why a kernel cannot be built; None if it can, or has not been tried."""
    return _failed.get(kernel)


def any_failed() -> bool:
    """True if there is a kernel that cannot be built."""
    return bool(_failed)


def check(*kernel: object) -> None:
    """Raise CannotBuildError if the kernel is known to fail."""
    if (reason := failure(*kernel)) is not None:
        raise CannotBuildError(reason)


def failures() -> dict[str, str]:
    """All kernels that could not be built in this process, and why."""
    return {", ".join(map(str, kernel)): reason for kernel, reason in _failed.items()}


@contextmanager
def building(*kernel: object) -> Iterator[None]:
    """Around a launch: what goes wrong in its build is remembered for these names.

    Raises:
        CannotBuildError: the build failed. What a device reports while it runs (no memory left, an
            illegal address) is none of the build's and goes through.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = lines or ["no message"]
        # What the driver says of a kernel that runs.
        if lines[0].startswith("Triton Error ["):
            raise
        _failed[kernel] = f"its kernel failed to build: {type(error).__name__}: {lines[0]}"
        raise CannotBuildError(_failed[kernel]) from error
