"""The safetensors file beside the YAML: arrays to bytes and back, checked against the hash in the YAML."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from artifacts.errors import ArtifactError, shorten
from artifacts.schema import Sidecar

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

T = TypeVar("T")


def to_bytes(arrays: Mapping[str, Array]) -> bytes:
    """A safetensors file; the same bytes whatever the mapping's order and the arrays' strides."""
    import numpy as np
    from safetensors.numpy import save

    # safetensors writes the buffer as it lies: it has to be in C order and in this machine's byte order.
    data: bytes = save({name: np.asarray(a, dtype=a.dtype.newbyteorder("="), order="C") for name, a in arrays.items()})
    return data


def read_arrays(file: Path, sidecar: Sidecar) -> dict[str, Array]:
    """The arrays in `file`.

    Raises:
        FileNotFoundError: there is no such file.
        ArtifactError: the file is not the one that `sidecar` describes, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    data = _read(file, file.read_bytes)
    _compare(file, sidecar, hashlib.sha256(data).hexdigest())
    try:
        arrays: dict[str, Array] = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ArtifactError(f"sidecar.file: {shorten(file.name)} is no safetensors file of arrays ({error})") from None
    return arrays


def check(file: Path, sidecar: Sidecar) -> None:
    """Raise as read_arrays() does, without holding the file in memory."""

    def digest() -> str:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    _compare(file, sidecar, _read(file, digest))


def _read(file: Path, read: Callable[[], T]) -> T:
    if file.exists() and not file.is_file():
        raise ArtifactError(f"sidecar.file: {shorten(file.name)} is no regular file")
    try:
        return read()
    except FileNotFoundError:
        raise
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ArtifactError(f"sidecar.file: {shorten(file.name)} cannot be read, {why}") from None


def _compare(file: Path, sidecar: Sidecar, actual: str) -> None:
    if actual != sidecar.sha256:
        raise ArtifactError(
            f"sidecar.sha256: says {shorten(sidecar.sha256, 14)} but {shorten(file.name)} gives "
            f"{shorten(actual, 14)}: the sidecar was changed or belongs to another artifact; "
            "restore it or run the search again"
        )
