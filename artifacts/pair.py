"""The two files of an artifact, replaced as one, and the clearing away of what writers that died left of theirs.

The sidecar's name has the first digits of its SHA-256, so that a new one never takes an old one's place: the new
sidecar is written first, the YAML's rename switches from the old pair to the new one at once, and only then the old
sidecar goes. Whenever the writer dies, the YAML names a sidecar that is there and right; at worst an unused one stays
behind, and the lock file says so to the next writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from artifacts import strict_yaml
from artifacts.files import atomic_write, open_regular
from artifacts.lock import Lock
from artifacts.schema import Sidecar

MAX_BYTES = 16 * 2**20


def sidecar_name(path: Path, sha256: str) -> str:
    """The name of the sidecar beside the YAML file at `path`."""
    return f"{path.stem}.{sha256[:8]}.safetensors"


def replace_pair(lock: Lock, path: Path, text: bytes, sidecar: Sidecar | None, data: bytes | None) -> None:
    """Replace the pair at `path`, whose lock is held; after a failure the old pair is there, without new files.

    Raises:
        HeadwiseError: a file cannot be written.
    """
    _clear(path, lock.leftovers)
    new = None if sidecar is None else path.with_name(sidecar.file)
    passing = [name for name in (_sidecar_of(path),) if name is not None]
    if new is not None and not new.exists():
        passing.append(new.name)
    lock.note(passing)
    try:
        if new is not None and sidecar is not None and data is not None and _sha256(new) != sidecar.sha256:
            atomic_write(new, data)
        atomic_write(path, text)
    finally:
        _clear(path, passing)


def _clear(path: Path, names: Iterable[str]) -> None:
    """Remove those of the sidecars that no YAML file beside them names, and files that were never finished."""
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
    """Whether a YAML file in the folder may name the sidecar: also a copy under another name, or an unreadable one."""
    try:
        others = [file for file in path.parent.iterdir() if file.suffix.lower() in (".yaml", ".yml")]
    except OSError:
        return True
    # The one that names a new sidecar comes first: the others need not be read for it.
    for file in [path, *others]:
        try:
            with open_regular(file) as stream:
                if tail in stream.read(MAX_BYTES):
                    return True
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def _sidecar_of(path: Path) -> str | None:
    """The sidecar that the YAML at `path` names; None where there is no readable artifact."""
    try:
        with open_regular(path) as stream:
            return str(strict_yaml.parse(stream.read(MAX_BYTES))["sidecar"]["file"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _sha256(path: Path) -> str | None:
    try:
        with open_regular(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None
