"""The two files of an artifact, replaced as one, by one writer at a time.

The sidecar's name has the first digits of its SHA-256, so that a new one never takes an old one's
place. Write order: new sidecar, YAML (atomic rename), delete the old sidecar. Whenever the writer
dies, the YAML names a sidecar that is there and right; at worst an unused one stays behind."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

from artifacts.errors import HeadwiseError, reason, shorten
from artifacts.files import atomic_write, open_regular
from artifacts.store import strict_yaml

MAX_BYTES = 16 * 2**20
TIMEOUT = 60.0
_PAUSE = 0.02
# What calls say of a file system that has no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextlib.contextmanager
def locked(target: Path, timeout: float = TIMEOUT) -> Iterator[None]:
    """Hold the lock of the artifact at `target`, shared by all of its stem.

    It is the system's, on a file beside the artifact, and ends with its holder. Where the file
    system has no locks there is none, and one process at a time may write.

    Raises:
        HeadwiseError: another process holds it for `timeout` seconds, or there can be no such file.
    """
    from filelock import FileLock, Timeout

    path = target.with_name(f".{target.stem}.lock")
    shown = shorten(str(target), 400)
    if not target.parent.is_dir():
        # The lock would make the folder.
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
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise HeadwiseError(
                f"cannot write {shown}: its lock file {path.name}: {reason(error)}"
            ) from error
    try:
        yield
    finally:
        # While it is held: whoever waits for this very file sees that it is gone and starts anew.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def sidecar_name(path: Path, sha256: str) -> str:
    """The name of the sidecar beside the YAML file at `path`."""
    return f"{path.stem}.{sha256[:8]}.safetensors"


def replace_pair(path: Path, text: bytes, name: str | None, data: bytes | None) -> None:
    """Replace the pair at `path`, whose lock is held; a failure leaves the old one alone.

    Args:
        path: the YAML file.
        text: its bytes.
        name, data: of the sidecar that it names; None where it has none.

    Raises:
        HeadwiseError: a file cannot be written.
    """
    _clear_unfinished(path)
    old = _own_sidecar(path)
    new = None
    if name is not None:
        new = path.with_name(name)
    created = new is not None and not new.exists()
    try:
        if new is not None and data is not None:
            atomic_write(new, data)
        atomic_write(path, text)
    except BaseException:
        # The YAML may have been switched already.
        if new is not None and created and _own_sidecar(path) != new:
            new.unlink(missing_ok=True)
        raise
    if old is not None and old != new:
        with contextlib.suppress(OSError):
            old.unlink()


def _own_sidecar(path: Path) -> Path | None:
    """Sidecar of the YAML at `path`, if save() named it; a hand-written name removes no file."""
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
    """Remove what a writer that died had begun to write."""
    sidecar = rf"{re.escape(path.stem)}\.[0-9a-f]{{8}}\.safetensors"
    unfinished = re.compile(rf"\.({re.escape(path.name)}|{sidecar})\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):
        for file in path.parent.iterdir():
            if unfinished.fullmatch(file.name):
                file.unlink()
