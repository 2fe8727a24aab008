"""Read an artifact: `cfg.yaml` to read and diff, `cfg.<8 hex>.safetensors` for arrays.

At any time a reader gets the old or the new pair (see artifacts.store.pair).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, naming, path_text, shorten
from artifacts.files import followed, read_regular
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

# Number of attempts; an attempt fails if the pair is replaced between its two reads.
_ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Artifact with its file contents.

    Attributes:
        data: bytes of the YAML file.
        arrays: arrays of the sidecar; empty without a sidecar.
        fault: fault of the sidecar, whose arrays are then omitted (see read_lenient()).
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
        path: YAML file, or a symbolic link to it.
        check_sidecar: read the sidecar too, and check its hash and its arrays; if False, the
            sidecar may be missing.
        verify: PEM file of a public key. An artifact without a signature by this key is rejected
            before anything else in it is read. None requires no signature.

    Raises:
        ArtifactError: the file cannot be read, is not an artifact, was changed, or has a newer
            schema version; its sidecar is missing or changed; it is not signed by the key. The
            message names the file, the field, the allowed values and the value.
        HeadwiseError: `verify` is not a public key.
    """
    path = Path(path)
    if check_sidecar:
        return read_pair(path, verify=verify).artifact
    return _parse(path, read_yaml(path), verify)


def load_arrays(path: str | os.PathLike[str], *, verify: Key | None = None) -> dict[str, Array]:
    """Read the arrays of the artifact at `path` by name; empty without a sidecar.

    Raises:
        ArtifactError: as load().
    """
    return read_pair(Path(path), verify=verify).arrays


def load_pair(
    path: str | os.PathLike[str], *, verify: Key | None = None
) -> tuple[Artifact, dict[str, Array]]:
    """Read an artifact and its arrays, consistent even if another process replaces the pair.

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
            if read_yaml(path) == data and not os.path.exists(file):
                break
    raise ArtifactError(
        f"{path_text(path)}: sidecar.file: {shorten(file.name)} is missing from "
        f"{shorten(str(file.parent), 400)}; the two files belong together"
    )


def read_lenient(path: Path) -> Pair:
    """Read as read_pair() does, but record a missing or wrong sidecar in `fault`.

    Raises:
        ArtifactError: as load() without check_sidecar.
    """
    try:
        return read_pair(path)
    except ArtifactError as error:
        data = read_yaml(path)
        fault = str(error).removeprefix(f"{path_text(path)}: ")
        return Pair(artifact=_parse(path, data), data=data, fault=fault)


def read_yaml(path: Path) -> bytes:
    """Return the raw bytes of the YAML file at `path`.

    Raises:
        ArtifactError: the file cannot be read, or has more than 16 MiB.
    """
    if os.path.isdir(path):
        raise ArtifactError(f"{path_text(path)}: is a directory, give the artifact's YAML file")
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
        artifact = _valid(fields)
        if check_content and (actual := content_sha256(fields)) != artifact.content_sha256:
            raise ArtifactError(
                f"content_sha256: says {shorten(artifact.content_sha256, 14)} but the content "
                f"gives {shorten(actual, 14)}: the file was changed after it was written; restore "
                "it, or keep the change with `headwise validate --rehash`"
            )
        return artifact


def _valid(fields: dict[str, Any]) -> Artifact:
    try:
        return to_artifact(fields)
    except ArtifactError as error:
        if not _is_unchanged(fields):
            raise
        raise ArtifactError(
            f"{error}: another version of headwise wrote this file, search again"
        ) from None


def _is_unchanged(fields: dict[str, Any]) -> bool:
    try:
        return bool(content_sha256(fields) == fields["content_sha256"])
    except (ArtifactError, AttributeError, TypeError):
        # A section is no mapping, or a value has no JSON form.
        return False


def _beside(path: Path, name: str) -> Path:
    """Return the file of this name next to the YAML file, or next to a link on the way to it."""
    files = [place.with_name(name) for place in followed(path)]
    return next((file for file in files if os.path.exists(file)), files[0])


def _arrays(path: Path, artifact: Artifact) -> dict[str, Array]:
    """Read the arrays of the sidecar, if any.

    Raises:
        FileNotFoundError: the sidecar is missing.
    """
    with naming(path):
        arrays: dict[str, Array] = {}
        if artifact.sidecar is not None:
            arrays = read_arrays(_beside(path, artifact.sidecar.file), artifact.sidecar.sha256)
        check_arrays(artifact, arrays)
        return arrays
