"""The safetensors file of an artifact: write arrays to bytes, read arrays with a hash check."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from artifacts.errors import ArtifactError, reason, shorten
from artifacts.files import open_regular

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# The file is read at once: its bytes and its arrays are in memory together.
MAX_SIDECAR = 2**26
# The header is JSON; each array in it becomes an object many times as large as its text.
MAX_HEADER = 5 * 2**20


def to_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Serialize arrays to safetensors; the bytes do not depend on key order or strides.

    Raises:
        ArtifactError: safetensors lacks a dtype, or the arrays exceed the limits of a sidecar.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save

    if (size := sum(array.nbytes for array in arrays.values())) > MAX_SIDECAR - MAX_HEADER:
        raise ArtifactError(
            f"the arrays have {size} bytes, a sidecar may have {MAX_SIDECAR - MAX_HEADER}"
        )
    # safetensors writes the raw buffer, so it has to be in C order and in the native byte order.
    plain = {
        name: np.asarray(a, dtype=a.dtype.newbyteorder("="), order="C")
        for name, a in arrays.items()
    }
    try:
        data: bytes = save(plain)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        kinds = sorted({str(a.dtype) for a in plain.values()})
        raise ArtifactError(
            f"safetensors cannot hold these arrays of {', '.join(kinds)}: "
            f"{shorten(str(error), 120)}"
        ) from None
    if (header := _header_length(data)) > MAX_HEADER:
        raise ArtifactError(
            f"{len(arrays)} arrays need a header of {header} bytes, a sidecar's may have "
            f"{MAX_HEADER}"
        )
    return data


def read_arrays(file: Path, sha256: str) -> dict[str, Array]:
    """Read the file, compare its hash, and only then parse it.

    Raises:
        FileNotFoundError: the file does not exist.
        ArtifactError: the SHA-256 differs, the file exceeds the limits of a sidecar, or it cannot
            be read.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    name = shorten(file.name)
    try:
        with open_regular(file) as stream:
            # A file may grow during the read, and files in /proc report a size of 0.
            size = os.fstat(stream.fileno()).st_size
            data = b""
            if size <= MAX_SIDECAR:
                data = stream.read(MAX_SIDECAR + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArtifactError(f"sidecar.file: {name} cannot be read, {reason(error)}") from None
    if max(size, len(data)) > MAX_SIDECAR:
        raise ArtifactError(
            f"sidecar.file: {name} has more than {MAX_SIDECAR} bytes, the most that one may have"
        )
    if (actual := hashlib.sha256(data).hexdigest()) != sha256:
        raise ArtifactError(
            f"sidecar.sha256: says {shorten(sha256, 14)} but {name} gives {shorten(actual, 14)}: "
            "the sidecar was changed or belongs to another artifact; restore it or run the search "
            "again"
        )
    if _header_length(data) > MAX_HEADER:
        raise ArtifactError(
            f"sidecar.file: {name} has a header of {_header_length(data)} bytes, it may have "
            f"{MAX_HEADER}"
        )
    try:
        arrays: dict[str, Array] = load(data)
    except (SafetensorError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"sidecar.file: {name} is no safetensors file of arrays ({shorten(str(error), 120)})"
        ) from None
    return arrays


def _header_length(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")
