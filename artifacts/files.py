"""Atomic writes, which leave the old or the new file, and reads that never block.

Reads follow symbolic links, writes replace them. Ask about a user's path with os.path.isfile and
the like: the methods of Path raise OSError for one that is too long, or may not be looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from artifacts.errors import ArtifactError, HeadwiseError, path_text, reason, shorten

# File systems allow 255 bytes. The names of the sidecar and the temporary file are longer than the
# name of the artifact.
_LONGEST_NAME = 200
# As many as Linux follows.
_MOST_LINKS = 40


def followed(path: Path) -> list[Path]:
    """Return where the symbolic link at `path` leads, each link on the way, and last `path`.

    What belongs to a file lies next to one of these. A path that is no link is the only one.
    """
    places = [path]
    with contextlib.suppress(OSError):
        while os.path.islink(places[-1]) and len(places) <= _MOST_LINKS:
            link = places[-1]
            places.append(Path(os.path.realpath(link.parent), os.readlink(link)))
    return places[::-1]


def atomic_write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a temporary file in the same directory, flush it to disk, and rename it to `path`.

    After a failure `path` is unchanged and the temporary file is removed. A symbolic link is
    replaced, not its target, which may belong to a store of downloaded files.

    Raises:
        HeadwiseError: the file cannot be written; the message has the reason.
    """
    target = Path(path)
    temporary = _beside(target)
    try:
        try:
            mode = None
            if os.path.exists(target):
                mode = target.stat().st_mode & 0o777
            _write_new(temporary, data, mode=mode)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_directory(target.parent)
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"cannot write {_quoted(target)}: {reason(error)}") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that `path` can be written, before long work starts; leave no file behind.

    Raises:
        HeadwiseError: `path` is empty or a directory, its directory is missing or refuses new
            files, or its name is too long.
    """
    target = Path(path)
    shown = _quoted(path)
    if not os.fspath(path) or not target.name or os.path.isdir(target):
        raise HeadwiseError(f"cannot write {shown}: it is a directory, give a file's name")
    if len(os.fsencode(target.name)) > _LONGEST_NAME:
        raise HeadwiseError(f"cannot write {shown}: the name has more than {_LONGEST_NAME} bytes")
    if os.path.exists(target) and not os.path.isfile(target):
        raise HeadwiseError(f"cannot write {shown}: it is no regular file")
    folder = target.parent
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            wrong = "is no directory"
        else:
            wrong = "does not exist"
        raise HeadwiseError(f"cannot write {shown}: the directory {_quoted(folder)} {wrong}")
    # Only a trial write detects read-only mounts, quotas and access lists.
    try:
        temporary = _beside(target)
        try:
            _write_new(temporary, b"", mode=None)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"cannot write {shown}: {reason(error)}") from error


@contextlib.contextmanager
def out_folder(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an output folder; remove it after a failure if it is empty.

    Raises:
        HeadwiseError: the folder cannot be made.
    """
    folder = Path(path)
    new_folders = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"cannot make the folder {_quoted(folder)}: {reason(error)}") from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for each in new_folders:
                each.rmdir()
        raise


class _WritableError(Exception):
    """The folder can be written: it is removed again."""


def check_folder(path: str | os.PathLike[str]) -> None:
    """Check that an output folder can be made and written, before long work; leave nothing.

    Raises:
        HeadwiseError: it cannot.
    """
    with contextlib.suppress(_WritableError), out_folder(path):
        check_writable(Path(path) / "file")
        raise _WritableError


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one, for reading; never block on a pipe or device.

    Raises:
        OSError: the file does not exist, cannot be read, or is not regular: a directory, a pipe or
            a device.
        ValueError: the path has a null byte.
    """
    # Check the open file: the target of a path may change after a check.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Is no regular file")
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, max_bytes: int, what: str) -> bytes:
    """Read a regular file of at most `max_bytes` bytes; `what` names it in the error.

    Raises:
        ArtifactError: the file does not exist, cannot be read, is not regular, or is too large; the
            message names it.
    """
    shown = path_text(path)
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ArtifactError(f"{shown}: no such file") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{shown}: cannot be read, {reason(error)}") from None
    if len(data) > max_bytes:
        raise ArtifactError(f"{shown}: has more than {max_bytes} bytes, too large for {what}")
    return data


def _quoted(path: str | os.PathLike[str]) -> str:
    # Paths get a higher length limit than other values: two paths often differ only at the end.
    return shorten(str(path), 400)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _write_new(path: Path, data: bytes, *, mode: int | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags, 0o666 if mode is None else mode)
    try:
        if mode is not None:
            # Some file systems do not support file modes.
            with contextlib.suppress(PermissionError):
                os.chmod(path, mode)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_directory(folder: Path) -> None:
    """Make the rename survive a power failure, if the system supports it (Windows does not)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
