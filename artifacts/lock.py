"""One writer at a time for an artifact: a lock that ends with its holder, and a note of what that may leave behind.

The lock is the system's on a file beside the artifact, so nobody has to guess whether a holder is still alive. The file
is there only while the lock is held, or after its holder died: then it says what the next one has to clear away.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from artifacts.errors import HeadwiseError, shorten

TIMEOUT = 60.0
_PAUSE = 0.02
_LONGEST_NOTE = 65_536
# What the calls say of a lock that another holds, and of a file system that has no locks.
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


class Lock:
    """A lock that is held. `leftovers`: the names that its former holder noted before it died."""

    def __init__(self, handle: int | None) -> None:
        """The open lock file; None where the file system has no locks, and nothing is noted then."""
        self._handle = handle
        noted = [] if handle is None else _note(handle).get("files")
        self.leftovers = tuple(name for name in noted if isinstance(name, str)) if isinstance(noted, list) else ()
        self.note(())

    def note(self, names: Sequence[str]) -> None:
        """Write down the names of files that are left over if this process dies now."""
        if self._handle is not None:
            text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "files": list(names)}).encode()
            os.pwrite(self._handle, text.ljust(_length(self._handle)), 0)


@contextlib.contextmanager
def locked(target: Path, timeout: float = TIMEOUT) -> Iterator[Lock]:
    """Hold the lock of the artifact at `target`; all that share its stem share one, as they share names of sidecars.

    Where the file system has no locks there is none, and one process at a time may write.

    Raises:
        HeadwiseError: another process holds it for `timeout` seconds, or there can be no such file.
    """
    path = target.with_name(f".{target.stem}.lock")
    handle, lock = _taken(target, path, timeout)
    try:
        yield lock
    finally:
        # While it is held: whoever waits for this very file sees that it is gone and starts anew.
        with contextlib.suppress(OSError):
            path.unlink()
        if handle is not None:
            os.close(handle)


def _taken(target: Path, path: Path, timeout: float) -> tuple[int | None, Lock]:
    shown = shorten(str(target), 400)
    try:
        handle = _acquire(path, time.monotonic() + timeout)
        if isinstance(handle, dict):
            how = f"has been writing it for {timeout:g} s" if timeout else "is writing it"
            raise HeadwiseError(
                f"cannot write {shown}: process {shorten(handle.get('pid'))} on {shorten(handle.get('host'))} {how}; "
                "wait for it or end it"
            )
        return handle, Lock(handle)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise HeadwiseError(f"cannot write {shown}: its lock file {path.name}: {why}") from error


def _acquire(path: Path, deadline: float) -> int | dict[str, Any] | None:
    """The open and locked file; None where there are no locks; the holder's note when the time is over."""
    import fcntl

    while True:
        # Never through a link that someone else put there.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, path):
                taken, handle = handle, -1
                return taken
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            if error.errno not in _HELD:
                raise
            if time.monotonic() >= deadline:
                return _note(handle)
            time.sleep(_PAUSE)
        finally:
            if handle != -1:
                os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether the file is still the one at `path`: its last holder removed it, and another may be there by now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _note(handle: int) -> dict[str, Any]:
    try:
        note = json.loads(os.pread(handle, _LONGEST_NOTE, 0))
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _length(handle: int) -> int:
    return min(os.fstat(handle).st_size, _LONGEST_NOTE)
