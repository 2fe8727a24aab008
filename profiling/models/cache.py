"""Models converted once and kept in the cache folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.errors import one_line, shorten


def cache_folder() -> Path:
    """HEADWISE_CACHE, or ~/.cache/headwise."""
    return Path(os.environ.get("HEADWISE_CACHE") or Path.home() / ".cache" / "headwise")


def made_once(kind: str, key: str, make: Callable[[Path], None], *, name: str) -> Path:
    """The folder `kind/key` of the cache folder, made by `make` where it is not there yet.

    A conversion is made next to its place and renamed into it under a lock that dies with its
    process: an interrupted one leaves nothing that counts, and of two at once one waits for the
    other.

    Args:
        kind: folder that the result is cached in.
        key: name of the result; it says all that the content depends on.
        make: is called with a folder that is not there.
        name: of the model, for a message.

    Raises:
        HeadwiseError: the cache folder cannot be written.
    """
    from filelock import FileLock

    root = cache_folder() / kind
    try:
        root.mkdir(parents=True, exist_ok=True)
        target = root / key
        unfinished = root / f"{key}.part"
        if os.path.isdir(target):
            return target
        with FileLock(root / f"{key}.lock"):
            if os.path.isdir(target):
                return target
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                make(unfinished)
                os.rename(unfinished, target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        reason = one_line(error.strerror or str(error)).lower()
        raise HeadwiseError(
            f"cannot keep the converted model {name} in {shorten(str(root))}: {reason}; "
            "HEADWISE_CACHE names another folder"
        ) from error
    return target
