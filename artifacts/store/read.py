"""An artifact on disk: `cfg.yaml` to read and diff, `cfg.<8 hex>.safetensors` for arrays.

A reader at any instant finds the old pair or the new one, and writers take turns: see
artifacts.store.pair."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, naming, one_line, shorten
from artifacts.files import atomic_write, check_writable, read_regular
from artifacts.schema.artifact import SCHEMA_VERSION, Artifact
from artifacts.schema.validation import to_artifact
from artifacts.store import strict_yaml
from artifacts.store.arrays import check_arrays, needed
from artifacts.store.hashing import canonical_json, content_of
from artifacts.store.pair import MAX_BYTES, TIMEOUT, locked, replace_pair, sidecar_name
from artifacts.store.sidecar import Entry, Sidecar, to_bytes
from artifacts.store.signing import Ask, Key, check_signature, signature, signature_path

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Editors that know the YAML language server complete and check by the schema, where it lies beside
# the file.
SCHEMA_FILE = f"headwise-v{SCHEMA_VERSION}.schema.json"
MAX_CONTENT = 4 * 2**20
"""Bytes of canonical JSON: whatever the layout of a file within it, it can be written again."""
_HEADER = (
    f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
    "# Written by headwise; `headwise show FILE` prints it, `set` changes it. A change by hand "
    "breaks the "
    "hash.\n"
)
# Each is another pair that was replaced between the two reads.
_ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An artifact as it was read.

    data: the bytes of the YAML file. arrays: the sidecar's, each read when it is asked for; empty
    where there is none. signed_by: the fingerprint of the key by whose holder it is signed; None
    where nobody was asked for. fault: what is wrong with the sidecar, whose arrays are left out
    then (see look())."""

    artifact: Artifact
    data: bytes
    arrays: Sidecar | dict[str, Array] = field(default_factory=dict)
    signed_by: str | None = None
    fault: str | None = None

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Dtypes and shapes of the arrays."""
        return self.arrays.entries if isinstance(self.arrays, Sidecar) else {}


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
        ArtifactError: a field is not as the schema wants it (possible with model_copy), an array of
        a static pattern,
            cost table or front is missing or not as it has to be, or there is more than an artifact
            may hold.
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
        path: the YAML file; it has to be there. change: makes of the artifact and its arrays, as
        they are now, those to be written. No other process writes
            while it runs: measure first, then call this.
        out: where to write it; another file is replaced, whatever it held, and the one at `path`
        stays as it is. None
            is `path`.
        timeout: how many seconds to wait for others that write.

    Returns:
        The artifact as save() returns it.

    Raises:
        ArtifactError: as load() and save().
        HeadwiseError: another process goes on writing, or the files cannot be written.
    """
    path = Path(path)
    target = path if out is None else Path(out)
    check_writable(target)
    with locked(target, timeout):
        artifact, arrays = change(*load_pair(path))
        return _prepared(artifact, target, arrays)()


def sign(path: str | os.PathLike[str], key: Key, ask: Ask | None = None) -> tuple[Path, str]:
    """Check the artifact at `path` and write the signature of the checked bytes next to it.

    Returns:
        The signature's path, and the fingerprint of the public key.

    Raises:
        ArtifactError: the artifact is not whole.
        HeadwiseError: as artifacts.store.signing.signature(), or the signature cannot be written.
    """
    path = Path(path)
    with locked(path):
        text, by = signature(read_pair(path).data, key, ask)
        atomic_write(signature_path(path), text)
    return signature_path(path), by


def load(
    path: str | os.PathLike[str], *, check_sidecar: bool = True, verify: Key | None = None
) -> Artifact:
    """Read an artifact and check it against its hash.

    Args:
        path: the YAML file. check_sidecar: also hash the sidecar, and look at the arrays that
        patterns need; without it the sidecar need
            not be there.
        verify: a public key, by its file or as the bytes of one: what its holder did not sign is
        refused, before
            anything else in the file is looked at. None asks for no signature.

    Raises:
        ArtifactError: the file cannot be read, is no artifact, was changed, is of a newer schema
        version, or
            its sidecar is missing or changed; it is not signed by the key. The line names the file,
            the field, its value and what would be right.
        HeadwiseError: `verify` is no public key.
    """
    path = Path(path)
    return (
        read_pair(path, verify=verify).artifact
        if check_sidecar
        else _parse(path, read_yaml(path), verify).artifact
    )


def load_arrays(path: str | os.PathLike[str], *, verify: Key | None = None) -> dict[str, Array]:
    """Read the arrays of the artifact at `path`, by name; empty where it has no sidecar.

    Raises:
        ArtifactError: as load().
    """
    return load_pair(path, verify=verify)[1]


def load_pair(
    path: str | os.PathLike[str], *, verify: Key | None = None, names: Collection[str] | None = None
) -> tuple[Artifact, dict[str, Array]]:
    """An artifact and its arrays, which belong together even if the pair is replaced meanwhile.

    Args:
        path: the YAML file. verify: as for load(). names: read only these arrays, where they are
        there, and those without which the patterns cannot be applied;
            None reads all.

    Raises:
        ArtifactError: as load().
    """
    pair = read_pair(Path(path), verify=verify)
    wanted = pair.arrays if names is None else {*names, *needed(pair.artifact)} & pair.arrays.keys()
    with naming(Path(path)):
        return pair.artifact, {name: pair.arrays[name] for name in wanted}


def read_pair(path: Path, *, verify: Key | None = None) -> Pair:
    """Read an artifact and check its sidecar; arrays that nothing needs are read on demand.

    Raises:
        ArtifactError: as load().
    """
    return _with_sidecar(path, _parse(path, read_yaml(path), verify), verify)


def look(path: Path) -> Pair:
    """As read_pair(), but a sidecar that is missing or wrong is a fault that the pair names.

    Raises:
        ArtifactError: as load() of the YAML alone.
    """
    pair = _parse(path, read_yaml(path), None)
    try:
        return _with_sidecar(path, pair, None)
    except ArtifactError as error:
        return replace(pair, fault=str(error).removeprefix(f"{one_line(str(path))}: "))


def _with_sidecar(path: Path, pair: Pair, verify: Key | None) -> Pair:
    for _ in range(_ATTEMPTS):
        artifact = pair.artifact
        if artifact.sidecar is None:
            with naming(path):
                check_arrays(artifact, None)
            return pair
        file = path.with_name(artifact.sidecar.file)
        try:
            with naming(path):
                arrays = Sidecar(file, artifact.sidecar.sha256)
                check_arrays(artifact, arrays, arrays.entries)
                return replace(pair, arrays=arrays)
        except FileNotFoundError:
            # A writer may have switched to a new pair since the YAML was read.
            if (data := read_yaml(path)) != pair.data:
                pair = _parse(path, data, verify)
            elif not file.exists():
                break
    raise ArtifactError(
        f"{one_line(str(path))}: sidecar.file: {shorten(file.name)} is missing from "
        f"{shorten(str(path.parent), 400)}; the two files belong together"
    )


def _prepared(
    artifact: Artifact, path: Path, arrays: Mapping[str, Array] | None
) -> Callable[[], Artifact]:
    """All of save() that needs no lock, and the rest as a function of one."""
    with naming(path):
        fields = artifact.model_dump(mode="json", warnings=False) | {
            "sidecar": None,
            "content_sha256": "",
        }
        check_arrays(to_artifact(fields), arrays)
        data = to_bytes(arrays) if arrays else None
        if data is not None:
            digest = hashlib.sha256(data).hexdigest()
            fields["sidecar"] = {"file": sidecar_name(path, digest), "sha256": digest}
        checked = to_artifact(fields)
        fields["content_sha256"] = _content_sha256(fields)
        text = _to_yaml(fields)
    saved = checked.model_copy(update={"content_sha256": fields["content_sha256"]})

    def write() -> Artifact:
        replace_pair(path, text, None if saved.sidecar is None else saved.sidecar.file, data)
        # It was of the file that is gone.
        with contextlib.suppress(OSError):
            signature_path(path).unlink()
        return saved

    return write


def _parse(path: Path, data: bytes, verify: Key | None) -> Pair:
    signed_by = None if verify is None else check_signature(path, data, verify)
    with naming(path):
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(
                f"not UTF-8 text (byte {error.start}), is this the YAML file?"
            ) from None
        fields = strict_yaml.parse(data)
        if not isinstance(fields, dict):
            raise ArtifactError(
                f"must be a mapping with schema_version and so on, got {shorten(fields)}"
            )
        version = fields.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise ArtifactError(
                f"schema_version: this headwise reads {SCHEMA_VERSION}, got {shorten(version)}: a "
                "file of a newer version needs a newer headwise"
            )
        missing = [name for name in Artifact.model_fields if name not in fields]
        if missing and fields.keys() <= Artifact.model_fields.keys():
            # Otherwise a misspelt name is what is wrong, and to_artifact says so.
            raise ArtifactError(f"{missing[0]}: missing (is the file cut short?)")
        artifact = to_artifact(fields)
        _check_content(fields)
        return Pair(artifact=artifact, data=data, signed_by=signed_by)


def _content_sha256(fields: Mapping[str, Any]) -> str:
    try:
        content = canonical_json(content_of(fields))
    except ValueError as error:
        raise ArtifactError(f"holds what JSON has no place for: {error}") from None
    if len(content) > MAX_CONTENT:
        raise ArtifactError(
            f"has {len(content)} bytes of content, an artifact may have {MAX_CONTENT}"
        )
    return hashlib.sha256(content).hexdigest()


def _check_content(fields: Mapping[str, Any]) -> None:
    stated = fields.get("content_sha256")
    actual = _content_sha256(fields)
    if stated != actual:
        raise ArtifactError(
            f"content_sha256: says {shorten(stated, 14)} but the content gives "
            f"{shorten(actual, 14)}: the file was changed after it was written; restore it, or "
            "change it by `headwise set`"
        )


def read_yaml(path: Path) -> bytes:
    """The bytes of the YAML file at `path`, as they are.

    Raises:
        ArtifactError: it cannot be read, or has more than 16 MiB.
    """
    if path.is_dir():
        raise ArtifactError(f"{one_line(str(path))}: is a directory, give the artifact's YAML file")
    return read_regular(path, MAX_BYTES, "an artifact's YAML file")


def _to_yaml(fields: Mapping[str, Any]) -> bytes:
    data = (_HEADER + strict_yaml.dump(fields)).encode()
    # A file that would not come back as it went in must never reach the disk.
    if len(data) > MAX_BYTES or strict_yaml.parse(data) != fields:
        raise ArtifactError("a field has no exact form in YAML")
    return data
