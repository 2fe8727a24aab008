"""Optuna's journal in a file, under a lock that ends with its holder, and healed of lines that a kill cut off."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from artifacts import HeadwiseError
from artifacts.errors import one_line

# What the calls say where a file system has no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
_BLOCK = 1 << 16


class StudyJournal(JournalFileBackend):
    """A journal that any of its processes may be killed over, in the middle of a write too.

    Optuna's own lock is a file that a killed holder leaves behind: the others wait for half a minute, and where the
    path is a relative one they never stop waiting. And a line appended to half a line can never be read again.

    Raises:
        HeadwiseError: in all methods, where the file is gone or damaged.
    """

    def __init__(self, path: Path) -> None:
        # Absolute: a process may change its folder.
        self._path = path.absolute()
        super().__init__(str(self._path), JournalFileOpenLock(str(self._path)))
        # Optuna passes over a last line that it cannot read, and over all that comes after it.
        with self._path.open("rb") as file:
            end = _end_of_lines(file, file.seek(0, os.SEEK_END))
            start = _end_of_lines(file, end - 1)
            file.seek(start)
            last = file.read(end - start)
        try:
            json.loads(last or "{}")
        except ValueError as error:
            raise self._damaged(error) from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations; when this returns they survive a kill, and once a trial ends also a loss of power."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        try:
            with self._path.open("r+b") as file, self._locked(file):
                file.seek(_end_of_lines(file, file.seek(0, os.SEEK_END)))
                file.truncate()
                file.write(text.encode())
                file.flush()
                # Of the dozen operations of a trial, one waits for the disk: on a busy one they would be most of it.
                if any(_ends_a_trial(log) for log in logs):
                    os.fsync(file.fileno())
        except FileNotFoundError:
            raise self._gone() from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise HeadwiseError(f"cannot write the journal {self._path}: {reason}") from error

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The operations from a number on."""
        try:
            yield from super().read_logs(log_number_from)
        except FileNotFoundError:
            raise self._gone() from None
        except ValueError as error:
            raise self._damaged(error) from error

    @contextlib.contextmanager
    def _locked(self, file: BinaryIO) -> Iterator[None]:
        import fcntl

        try:
            # Closing the file gives it back.
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            yield
            return
        self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _damaged(self, error: ValueError) -> HeadwiseError:
        reason = one_line(str(error))
        return HeadwiseError(f"the journal {self._path} is damaged ({reason}): remove it to start again")

    def _gone(self) -> HeadwiseError:
        return HeadwiseError(f"the journal {self._path} is gone: someone removed it, and all that was found with it")


def _ends_a_trial(log: dict[str, Any]) -> bool:
    return "state" in log and TrialState(log["state"]).is_finished()


def _end_of_lines(file: BinaryIO, end: int) -> int:
    """Where the last whole line of the first `end` bytes ends."""
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
