"""Write an artifact: `cfg.yaml`, and `cfg.<8 hex>.safetensors` for its arrays.

Writers wait for each other, and a crash leaves the old or the new pair (see artifacts.store.pair).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, naming
from artifacts.files import atomic_write, check_writable
from artifacts.schema.artifact import SCHEMA_VERSION, Artifact
from artifacts.schema.validation import to_artifact
from artifacts.store import strict_yaml
from artifacts.store.arrays import check_arrays
from artifacts.store.hashing import content_sha256
from artifacts.store.pair import MAX_BYTES, TIMEOUT, locked, replace_pair, sidecar_name
from artifacts.store.read import load_pair, read_pair
from artifacts.store.sidecar import to_bytes
from artifacts.store.signing import Key, signature, signature_path

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Editors with the YAML language server complete and check fields if the schema is in the folder of
# the file.
SCHEMA_FILE = f"headwise-v{SCHEMA_VERSION}.schema.json"
_HEADER = (
    f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
    "# Written by headwise; `headwise show FILE` prints it. A change by hand breaks the hash: "
    "`headwise validate --rehash FILE`.\n"
)


def save(
    artifact: Artifact, path: str | os.PathLike[str], arrays: Mapping[str, Array] | None = None
) -> Artifact:
    """Write the artifact to `path` and its arrays, if any, to the same folder.

    Equal content produces equal bytes, except for created_at and the commands. An existing pair is
    replaced regardless of its content; use update() to add to an artifact. The signature of a
    replaced file is deleted. After a failure the old pair is unchanged, and no new files remain.

    Returns:
        The artifact with new values of `sidecar` and `content_sha256`.

    Raises:
        ArtifactError: a field violates the schema (possible with model_copy), a required array is
            missing or wrong, or the artifact exceeds a size limit.
        HeadwiseError: the files cannot be written.
    """
    path = Path(path)
    check_writable(path)
    write = _prepared(artifact, path, arrays)
    with locked(path):
        return write()


def update(
    path: str | os.PathLike[str],
    change: Callable[[Artifact, dict[str, Array]], tuple[Artifact, Mapping[str, Array]]],
    *,
    out: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
) -> Artifact:
    """Change the artifact at `path` without losing concurrent changes of other processes.

    Args:
        path: existing YAML file.
        change: returns the artifact and arrays to write from the existing ones. No other process
            can write while it runs, so finish long measurements first.
        out: file to write or replace instead of `path`; None means `path`.
        timeout: seconds to wait for other writers.

    Returns:
        The artifact as save() returns it.

    Raises:
        ArtifactError: as load() and save().
        HeadwiseError: another process holds the lock too long, or the files cannot be written.
    """
    path = Path(path)
    if out is None:
        target = path
    else:
        target = Path(out)
    check_writable(target)
    with locked(target, timeout):
        artifact, arrays = change(*load_pair(path))
        return _prepared(artifact, target, arrays)()


def rehash(path: str | os.PathLike[str]) -> Artifact:
    """Rewrite the artifact at `path` with the hash of its content, after a manual edit.

    Returns:
        The artifact as save() returns it.

    Raises:
        ArtifactError: as load(), except for a wrong content hash.
        HeadwiseError: as update().
    """
    path = Path(path)
    check_writable(path)
    with locked(path):
        pair = read_pair(path, check_content=False)
        return _prepared(pair.artifact, path, pair.arrays)()


def sign(path: str | os.PathLike[str], key: Key, passphrase: bytes | None = None) -> Path:
    """Check the artifact at `path` and write the signature of the checked bytes to its folder.

    Returns:
        The signature's path.

    Raises:
        ArtifactError: the artifact is incomplete.
        HeadwiseError: as artifacts.store.signing.signature(), or the signature cannot be written.
    """
    path = Path(path)
    with locked(path):
        text = signature(path, read_pair(path).data, key, passphrase)
        atomic_write(signature_path(path), text)
    return signature_path(path)


def _prepared(
    artifact: Artifact, path: Path, arrays: Mapping[str, Array] | None
) -> Callable[[], Artifact]:
    """Check and serialize without a lock; return the function that writes."""
    with naming(path):
        data = None
        sidecar = None
        if arrays:
            data = to_bytes(arrays)
            digest = hashlib.sha256(data).hexdigest()
            sidecar = {"file": sidecar_name(path, digest), "sha256": digest}
        fields = artifact.model_dump(mode="json", warnings=False)
        fields |= {"sidecar": sidecar, "content_sha256": ""}
        checked = to_artifact(fields)
        check_arrays(checked, arrays or {})
        fields["content_sha256"] = content_sha256(fields)
        text = _to_yaml(fields)
    saved = checked.model_copy(update={"content_sha256": fields["content_sha256"]})

    def write() -> Artifact:
        replace_pair(path, text, saved.sidecar.file if saved.sidecar else None, data)
        # The signature belongs to the replaced file.
        with contextlib.suppress(OSError):
            signature_path(path).unlink()
        return saved

    return write


def _to_yaml(fields: Mapping[str, Any]) -> bytes:
    data = (_HEADER + strict_yaml.dump(fields)).encode()
    # Never write a file that does not read back as the same artifact.
    if len(data) > MAX_BYTES or strict_yaml.parse(data) != fields:
        raise ArtifactError("a field has no exact form in YAML")
    return data
