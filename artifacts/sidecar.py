"""The safetensors file beside the YAML: arrays to bytes and back, checked against the hash in the YAML."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from artifacts.errors import ArtifactError, shorten
from artifacts.files import open_regular
from artifacts.schema import Sidecar

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MAX_SIDECAR = 2**30
# The header is JSON and each array in it an object: in memory they take up to 16 times their bytes.
MAX_HEADER = 5 * 2**20
MAX_ARRAYS = 40_000


def to_bytes(arrays: Mapping[str, Array]) -> bytes:
    """A safetensors file; the same bytes whatever the mapping's order and the arrays' strides.

    Raises:
        ArtifactError: a dtype that safetensors lacks, or more than a sidecar may hold.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save

    if len(arrays) > MAX_ARRAYS:
        raise ArtifactError(f"{len(arrays)} arrays, a sidecar may have {MAX_ARRAYS}")
    # safetensors writes the buffer as it lies: it has to be in C order and in this machine's byte order.
    plain = {name: np.asarray(a, dtype=a.dtype.newbyteorder("="), order="C") for name, a in arrays.items()}
    try:
        data: bytes = save(plain)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        kinds = sorted({str(a.dtype) for a in plain.values()})
        raise ArtifactError(f"safetensors cannot hold these arrays of {', '.join(kinds)}: {_said(error)}") from None
    if len(data) > MAX_SIDECAR:
        raise ArtifactError(f"the arrays come to {len(data)} bytes, a sidecar may have {MAX_SIDECAR}")
    return data


def read_arrays(file: Path, sidecar: Sidecar) -> dict[str, Array]:
    """The arrays in `file`.

    Raises:
        FileNotFoundError: there is no such file.
        ArtifactError: the file is not the one that `sidecar` describes, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    with _opened(file) as stream:
        data = stream.read()
    _compare(file, sidecar, hashlib.sha256(data).hexdigest())
    if fault := _fault(data):
        raise ArtifactError(f"sidecar.file: {shorten(file.name)} is no safetensors file of arrays ({fault})")
    try:
        arrays: dict[str, Array] = load(data)
    except (SafetensorError, AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"sidecar.file: {shorten(file.name)} is no safetensors file of arrays ({_said(error)})"
        ) from None
    return arrays


def check(file: Path, sidecar: Sidecar) -> None:
    """Raise as read_arrays() does, without holding the file in memory or looking at what is in it."""
    with _opened(file) as stream:
        _compare(file, sidecar, hashlib.file_digest(stream, "sha256").hexdigest())


@contextmanager
def _opened(file: Path) -> Iterator[BufferedReader]:
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MAX_SIDECAR:
                raise ArtifactError(
                    f"sidecar.file: {shorten(file.name)} has {size} bytes, a sidecar may have {MAX_SIDECAR}"
                )
            yield stream
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


def _fault(data: bytes) -> str | None:
    """What is wrong with the header's size, before anything of that size is read."""
    header = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header > len(data) - 8:
        return f"its header of {header} bytes does not fit into {len(data)}"
    if header > MAX_HEADER:
        return f"its header has {header} bytes, a sidecar's may have {MAX_HEADER}"
    if data.count(b'"data_offsets"', 8, 8 + header) > MAX_ARRAYS:
        return f"it has more than {MAX_ARRAYS} arrays"
    return None


def _said(error: Exception) -> str:
    return shorten(str(error), 120)
