"""Atomic replacement of the two files of an artifact, by one writer at a time.

The name of a sidecar has the first digits of its SHA-256, so that a new sidecar never overwrites an
old one. Write order: new sidecar, YAML (atomic rename), delete the old sidecar. After a crash at
any time, the YAML names a sidecar that exists and matches; at worst an unused sidecar remains.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from artifacts.errors import HeadwiseError, one_line, reason, shorten
from artifacts.files import atomic_write, open_regular
from artifacts.store import strict_yaml

MAX_BYTES = 16 * 2**20
TIMEOUT = 60.0
_PAUSE = 0.02
# Errors of lock calls on a file system without locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextlib.contextmanager
def locked(target: Path, timeout: float = TIMEOUT) -> Iterator[None]:
    """Hold the lock of the artifact at `target`, shared by all of its stem.

    The lock is a system lock on a file in the artifact's folder, released when its process ends. On
    a file system without locks nothing is locked, and only one process at a time may write.

    Raises:
        HeadwiseError: another process holds the lock for `timeout` seconds, or the lock file cannot
            be created.
    """
    from filelock import FileLock, Timeout

    path = target.with_name(f".{target.stem}.lock")
    shown = shorten(str(target), 400)
    if not os.path.isdir(target.parent):
        # Creating the lock file would create the folder.
        raise HeadwiseError(f"cannot write {shown}: no such file or directory")
    lock = FileLock(path, timeout=timeout, thread_local=False)
    try:
        lock.acquire(poll_interval=_PAUSE)
    except Timeout:
        if timeout:
            since = f"has been writing it for {timeout:g} s"
        else:
            since = "is writing it"
        raise HeadwiseError(
            f"cannot write {shown}: another process {since}; wait for it or end it"
        ) from None
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) not in _NO_LOCKS:
            raise HeadwiseError(
                f"cannot write {shown}: its lock file {one_line(path.name)}: {reason(error)}"
            ) from error
    try:
        yield
    finally:
        # Delete it under the lock: a process that waits for the file sees the deletion and retries.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def sidecar_name(path: Path, sha256: str) -> str:
    """Return the name of the sidecar of the YAML file at `path`."""
    return f"{path.stem}.{sha256[:8]}.safetensors"


def replace_pair(path: Path, text: bytes, name: str | None, data: bytes | None) -> None:
    """Replace the pair at `path` while the lock is held; a failure keeps the old pair.

    Args:
        path: YAML file.
        text: bytes of the YAML file.
        name: name of the sidecar; None without a sidecar.
        data: bytes of the sidecar; None without a sidecar.

    Raises:
        HeadwiseError: a file cannot be written.
    """
    _clear_unfinished(path)
    old = _own_sidecar(path)
    new = None
    if name is not None:
        new = path.with_name(name)
    created = new is not None and not os.path.exists(new)
    try:
        if new is not None and data is not None:
            atomic_write(new, data)
        atomic_write(path, text)
    except BaseException:
        # The YAML file may already be replaced.
        if new is not None and created and _own_sidecar(path) != new:
            new.unlink(missing_ok=True)
        raise
    if old is not None and old != new:
        with contextlib.suppress(OSError):
            old.unlink()


def _own_sidecar(path: Path) -> Path | None:
    """Sidecar of the YAML at `path` if save() named it, so that no other file is removed."""
    try:
        with open_regular(path) as stream:
            lines = stream.read(MAX_BYTES).splitlines()
        line = next(line for line in reversed(lines) if line.startswith(b"sidecar:"))
        name = strict_yaml.parse(line)["sidecar"]["file"]
        ours = re.fullmatch(rf"{re.escape(path.stem)}\.[0-9a-f]{{8}}\.safetensors", name)
    except (OSError, ValueError, TypeError, KeyError, StopIteration):
        return None
    if ours:
        return path.with_name(name)
    return None


def _clear_unfinished(path: Path) -> None:
    """Remove unfinished files of a writer that crashed."""
    sidecar = rf"{re.escape(path.stem)}\.[0-9a-f]{{8}}\.safetensors"
    unfinished = re.compile(rf"\.({re.escape(path.name)}|{sidecar})\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):
        for file in path.parent.iterdir():
            if unfinished.fullmatch(file.name):
                file.unlink()
