"""Writes an artifact: `cfg.yaml`, and `cfg.<8 hex>.safetensors` for its arrays.

Writers wait for each other, and a crash leaves the old pair or the new one: see
artifacts.store.pair."""

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

# Editors that know the YAML language server complete and check by the schema, where it lies beside
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
    """Write the artifact to `path` and its arrays, if any, beside it.

    The same content gives the same bytes but for created_at and the commands. An existing pair is
    replaced, whatever it held: what adds to an artifact calls update(). A signature of the file
    that is replaced goes. After a failure the old pair is as it was, without new files.

    Returns:
        The artifact with `sidecar` and `content_sha256` filled in, whatever they were.

    Raises:
        ArtifactError: a field is not as the schema wants it (possible with model_copy), a required
            array is missing or wrong, or there is more than an artifact may hold.
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
    """Change the artifact at `path` without losing what others write into it meanwhile.

    Args:
        path: the YAML file; it has to be there.
        change: makes the artifact and arrays to write of those that are there. No other process
            writes while it runs: measure first, then call this.
        out: the file to write, which is replaced, while the one at `path` stays; None is `path`.
        timeout: seconds to wait for other writers.

    Returns:
        The artifact as save() returns it.

    Raises:
        ArtifactError: as load() and save().
        HeadwiseError: another process goes on writing, or the files cannot be written.
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
    """Write the artifact at `path` anew with the hash of its content, after a change by hand.

    Returns:
        The artifact as save() returns it.

    Raises:
        ArtifactError: as load(), but for a wrong content hash.
        HeadwiseError: as update().
    """
    path = Path(path)
    check_writable(path)
    with locked(path):
        pair = read_pair(path, check_content=False)
        return _prepared(pair.artifact, path, pair.arrays)()


def sign(path: str | os.PathLike[str], key: Key, passphrase: bytes | None = None) -> Path:
    """Check the artifact at `path` and write the signature of the checked bytes next to it.

    Returns:
        The signature's path.

    Raises:
        ArtifactError: the artifact is not whole.
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
    """Check and serialise, which needs no lock; returns the function that writes."""
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
        # It was of the file that is gone.
        with contextlib.suppress(OSError):
            signature_path(path).unlink()
        return saved

    return write


def _to_yaml(fields: Mapping[str, Any]) -> bytes:
    data = (_HEADER + strict_yaml.dump(fields)).encode()
    # A file that would not come back as it went in must never reach the disk.
    if len(data) > MAX_BYTES or strict_yaml.parse(data) != fields:
        raise ArtifactError("a field has no exact form in YAML")
    return data
