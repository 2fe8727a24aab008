"""The two files of an artifact, replaced as one, by one writer at a time.

The sidecar's name has the first digits of its SHA-256, so that a new one never takes an old one's place: the new
sidecar is written first, the YAML's rename switches from the old pair to the new one at once, and only then the old
sidecar goes, if nothing beside it names it. Whenever the writer dies, the YAML names a sidecar that is there and right;
at worst an unused one stays behind, and the lock file says so to the next writer.

The lock is the system's on a file beside the artifact, so nobody has to guess whether a holder is still alive. The file
is there only while the lock is held, or after its holder died: then it says what the next one has to clear away.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from artifacts import strict_yaml
from artifacts.errors import HeadwiseError, reason, shorten
from artifacts.files import atomic_write, open_regular

MAX_BYTES = 16 * 2**20
TIMEOUT = 60.0
_PAUSE = 0.02
_LONGEST_NOTE = 65_536
# More than this beside an artifact is not looked through: then whatever may be named there stays.
_MOST_BESIDE = 2**28
# What calls say of a file system that has no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


class Lock:
    """A lock that is held. `leftovers`: the names that its former holder noted before it died."""

    def __init__(self, path: Path | None) -> None:
        """The locked file; None where the file system has no locks, and nothing is noted then."""
        self._path = path
        noted = [] if path is None else _note(path).get("files")
        self.leftovers = tuple(name for name in noted if isinstance(name, str)) if isinstance(noted, list) else ()
        self.note(())

    def note(self, names: Sequence[str]) -> None:
        """Write down the names of files that are left over if this process dies now."""
        if self._path is not None:
            text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "files": list(names)})
            with open(self._path, "r+b") as file:
                file.write(text.encode().ljust(min(os.fstat(file.fileno()).st_size, _LONGEST_NOTE)))


@contextlib.contextmanager
def locked(target: Path, timeout: float = TIMEOUT) -> Iterator[Lock]:
    """Hold the lock of the artifact at `target`; all that share its stem share one, as they share names of sidecars.

    Where the file system has no locks there is none, and one process at a time may write.

    Raises:
        HeadwiseError: another process holds it for `timeout` seconds, or there can be no such file.
    """
    from filelock import FileLock, Timeout

    path, shown = target.with_name(f".{target.stem}.lock"), shorten(str(target), 400)
    if not target.parent.is_dir():
        # The lock would make the folder.
        raise HeadwiseError(f"cannot write {shown}: no such file or directory")
    lock = FileLock(path, timeout=timeout, thread_local=False)
    try:
        lock.acquire(poll_interval=_PAUSE)
        held = Lock(path)
    except Timeout:
        holder = _note(path)
        how = f"has been writing it for {timeout:g} s" if timeout else "is writing it"
        raise HeadwiseError(
            f"cannot write {shown}: process {shorten(holder.get('pid'))} on {shorten(holder.get('host'))} {how}; "
            "wait for it or end it"
        ) from None
    except OSError as error:
        lock.release()
        if error.errno not in _NO_LOCKS:
            raise HeadwiseError(f"cannot write {shown}: its lock file {path.name}: {reason(error)}") from error
        held = Lock(None)
    try:
        yield held
    finally:
        # While it is held: whoever waits for this very file sees that it is gone and starts anew.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def sidecar_name(path: Path, sha256: str) -> str:
    """The name of the sidecar beside the YAML file at `path`."""
    return f"{path.stem}.{sha256[:8]}.safetensors"


def replace_pair(lock: Lock, path: Path, text: bytes, name: str | None, data: bytes | None) -> None:
    """Replace the pair at `path`, whose lock is held; after a failure the old pair is there, without new files.

    Args:
        lock: of the pair.
        path: the YAML file.
        text: its bytes.
        name, data: of the sidecar that it names; None where it has none.

    Raises:
        HeadwiseError: a file cannot be written.
    """
    _clear(path, lock.leftovers)
    new = None if name is None else path.with_name(name)
    passing = [old for old in (_sidecar_of(path),) if old is not None]
    if new is not None and not new.exists():
        passing.append(new.name)
    lock.note(passing)
    try:
        if new is not None and data is not None and not _holds(new, data):
            atomic_write(new, data)
        atomic_write(path, text)
    finally:
        _clear(path, passing)


def _clear(path: Path, names: Iterable[str]) -> None:
    """Remove those of the sidecars that no file beside them names, and files that were never finished."""
    stem = re.escape(path.stem)
    # Only what save() named itself: neither a hand-written YAML nor a lock file gets other files removed.
    ours = re.compile(rf"{stem}(\.[0-9a-f]{{8}}\.safetensors)")
    unfinished = re.compile(rf"\.({re.escape(path.name)}|{stem}\.[0-9a-f]{{8}}\.safetensors)\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):
        for file in path.parent.iterdir():
            if unfinished.fullmatch(file.name):
                file.unlink()
    for name in names:
        # The stem may be escaped in YAML, what follows it never is.
        if (match := ours.fullmatch(name)) and not _is_named(match[1].encode(), path):
            with contextlib.suppress(OSError):
                path.with_name(name).unlink()


def _is_named(tail: bytes, path: Path) -> bool:
    """Whether a file in the folder may name the sidecar: a copy under any name, a backup, or an unreadable one."""
    left = _MOST_BESIDE
    try:
        others = sorted(file for file in path.parent.iterdir() if file.suffix not in (".safetensors", ".lock"))
    except OSError:
        return True
    # The one that names a new sidecar comes first: the others need not be read for it.
    for file in [path, *others]:
        try:
            if not file.is_file():
                continue
            with open_regular(file) as stream:
                data = stream.read(MAX_BYTES)
        except FileNotFoundError:
            continue
        except OSError:
            return True
        left -= len(data)
        if tail in data or left < 0:
            return True
    return False


def _sidecar_of(path: Path) -> str | None:
    """The sidecar that the YAML at `path` names; None where there is no readable artifact."""
    try:
        with open_regular(path) as stream:
            return str(strict_yaml.parse(stream.read(MAX_BYTES))["sidecar"]["file"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _holds(path: Path, data: bytes) -> bool:
    try:
        with open_regular(path) as stream:
            return hashlib.file_digest(stream, "sha256").digest() == hashlib.sha256(data).digest()
    except OSError:
        return False


def _note(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            note = json.loads(file.read(_LONGEST_NOTE))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
