"""Reads an artifact: `cfg.yaml` to read and diff, `cfg.<8 hex>.safetensors` for arrays.

A reader at any instant finds the old pair or the new one: see artifacts.store.pair."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, naming, one_line, shorten
from artifacts.files import read_regular
from artifacts.schema.artifact import SCHEMA_VERSION, Artifact
from artifacts.schema.validation import to_artifact
from artifacts.store import strict_yaml
from artifacts.store.arrays import check_arrays
from artifacts.store.hashing import content_sha256
from artifacts.store.pair import MAX_BYTES
from artifacts.store.sidecar import read_arrays
from artifacts.store.signing import Key, check_signature

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Each is another pair that was replaced between the two reads.
_ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An artifact as it was read.

    Attributes:
        data: the bytes of the YAML file.
        arrays: the sidecar's; empty where there is none.
        fault: of the sidecar, whose arrays are left out then (see read_lenient()).
    """

    artifact: Artifact
    data: bytes
    arrays: dict[str, Array] = field(default_factory=dict)
    fault: str | None = None


def load(
    path: str | os.PathLike[str], *, check_sidecar: bool = True, verify: Key | None = None
) -> Artifact:
    """Read an artifact and check it against its hash.

    Args:
        path: the YAML file.
        check_sidecar: also read the sidecar, and check its hash and its arrays; without it the
            sidecar need not be there.
        verify: the PEM file of a public key: an artifact that its holder did not sign is refused
            before anything else in it is read. None asks for no signature.

    Raises:
        ArtifactError: the file cannot be read, is no artifact, was changed, or is of a newer schema
            version; its sidecar is missing or changed; it is not signed by the key. The line names
            the file, the field, what would be right and its value.
        HeadwiseError: `verify` is no public key.
    """
    path = Path(path)
    if check_sidecar:
        return read_pair(path, verify=verify).artifact
    return _parse(path, read_yaml(path), verify)


def load_arrays(path: str | os.PathLike[str], *, verify: Key | None = None) -> dict[str, Array]:
    """Read the arrays of the artifact at `path`, by name; empty where it has no sidecar.

    Raises:
        ArtifactError: as load().
    """
    return read_pair(Path(path), verify=verify).arrays


def load_pair(
    path: str | os.PathLike[str], *, verify: Key | None = None
) -> tuple[Artifact, dict[str, Array]]:
    """An artifact and its arrays, which belong together even if the pair is replaced meanwhile.

    Args:
        path: the YAML file.
        verify: as for load().

    Raises:
        ArtifactError: as load().
    """
    pair = read_pair(Path(path), verify=verify)
    return pair.artifact, pair.arrays


def read_pair(path: Path, *, verify: Key | None = None, check_content: bool = True) -> Pair:
    """Read an artifact and its sidecar.

    Args:
        path: the YAML file.
        verify: as for load().
        check_content: also compare the content with its hash.

    Raises:
        ArtifactError: as load().
    """
    for _ in range(_ATTEMPTS):
        data = read_yaml(path)
        artifact = _parse(path, data, verify, check_content)
        try:
            return Pair(artifact=artifact, data=data, arrays=_arrays(path, artifact))
        except FileNotFoundError as error:
            file = Path(error.filename)
            # A writer may have switched to a new pair since the YAML was read.
            if read_yaml(path) == data and not file.exists():
                break
    raise ArtifactError(
        f"{one_line(str(path))}: sidecar.file: {shorten(file.name)} is missing from "
        f"{shorten(str(path.parent), 400)}; the two files belong together"
    )


def read_lenient(path: Path) -> Pair:
    """As read_pair(), but a sidecar that is missing or wrong is a fault that the pair names.

    Raises:
        ArtifactError: as load() of the YAML alone.
    """
    try:
        return read_pair(path)
    except ArtifactError as error:
        data = read_yaml(path)
        fault = str(error).removeprefix(f"{one_line(str(path))}: ")
        return Pair(artifact=_parse(path, data), data=data, fault=fault)


def read_yaml(path: Path) -> bytes:
    """The bytes of the YAML file at `path`, as they are.

    Raises:
        ArtifactError: it cannot be read, or has more than 16 MiB.
    """
    if path.is_dir():
        raise ArtifactError(f"{one_line(str(path))}: is a directory, give the artifact's YAML file")
    return read_regular(path, MAX_BYTES, "an artifact's YAML file")


def _parse(
    path: Path, data: bytes, verify: Key | None = None, check_content: bool = True
) -> Artifact:
    if verify is not None:
        check_signature(path, data, verify)
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
        if missing := [name for name in Artifact.model_fields if name not in fields]:
            raise ArtifactError(f"{missing[0]}: missing (is the file cut short?)")
        artifact = to_artifact(fields)
        if check_content and (actual := content_sha256(fields)) != artifact.content_sha256:
            raise ArtifactError(
                f"content_sha256: says {shorten(artifact.content_sha256, 14)} but the content "
                f"gives {shorten(actual, 14)}: the file was changed after it was written; restore "
                "it, or keep the change with `headwise validate --rehash`"
            )
        return artifact


def _arrays(path: Path, artifact: Artifact) -> dict[str, Array]:
    """Arrays of the sidecar, if the artifact has one; FileNotFoundError where it is not there."""
    with naming(path):
        arrays: dict[str, Array] = {}
        if artifact.sidecar is not None:
            file = path.with_name(artifact.sidecar.file)
            arrays = read_arrays(file, artifact.sidecar.sha256)
        check_arrays(artifact, arrays)
        return arrays
