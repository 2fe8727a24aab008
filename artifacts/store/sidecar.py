"""The safetensors file of an artifact: arrays to bytes, and back one by one, hash first."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from artifacts.errors import ArtifactError, reason, shorten
from artifacts.files import open_regular

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MAX_SIDECAR = 2**28
# The header is JSON and each array in it an object: in memory they take up to 16 times their bytes.
MAX_HEADER = 5 * 2**20
MAX_ARRAYS = 40_000
MAX_DIMENSIONS = 32
_CHUNK = 2**20
_DTYPES = {
    "BOOL": "bool",
    **{
        f"{kind}{bits}": f"{name}{bits}"
        for kind, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}


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
    if (size := sum(array.nbytes for array in arrays.values())) > MAX_SIDECAR - MAX_HEADER:
        raise ArtifactError(
            f"the arrays come to {size} bytes, a sidecar may have {MAX_SIDECAR - MAX_HEADER}"
        )
    # safetensors writes the buffer as it lies: it has to be in C order and in this machine's byte
    # order.
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
    return data


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Header entry of an array; `begin` counts in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def size(self) -> int:
        """Its elements."""
        return prod(self.shape)


class Sidecar(Mapping[str, "Array"]):
    """Arrays of a sidecar with the right hash, each read on demand and anew each time.

    Attributes:
        entries: what the header says of each array, by name.
    """

    def __init__(self, file: Path, sha256: str) -> None:
        """Open the file, hash it and read its header, no more than a MiB at a time.

        Raises:
            FileNotFoundError: there is no such file.
            ArtifactError: it is not the file with this SHA-256, holds more than a sidecar may, or
                cannot be read.
        """
        self._name = shorten(file.name)
        self._sha256 = sha256
        self.entries: dict[str, Entry] = {}
        try:
            self._stream = open_regular(file)
            self._before = self._state()
            _compare(self._name, sha256, _digest(self._stream, self._name))
            self.entries = _entries(self._stream)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ArtifactError(
                f"sidecar.file: {self._name} cannot be read, {reason(error)}"
            ) from None
        except _Fault as fault:
            raise ArtifactError(
                f"sidecar.file: {self._name} is no safetensors file of arrays ({fault})"
            ) from None

    def __getitem__(self, name: str) -> Array:
        import numpy as np

        entry = self.entries[name]
        data = bytearray(entry.nbytes)
        try:
            self._stream.seek(entry.begin)
            read = self._stream.readinto(data)
        except OSError as error:
            raise ArtifactError(
                f"sidecar.file: {self._name} cannot be read, {reason(error)}"
            ) from None
        if read != entry.nbytes or not self._unchanged():
            raise ArtifactError(
                f"sidecar.file: {self._name} was changed while it was read, try again"
            )
        little = np.frombuffer(data, dtype=np.dtype(entry.dtype).newbyteorder("<"))
        return little.astype(entry.dtype, copy=False).reshape(entry.shape)

    def __contains__(self, name: object) -> bool:
        """As Mapping's, which would read the array to see."""
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _unchanged(self) -> bool:
        """True while the file is as it was hashed, also if it was moved or removed."""
        if (now := self._state()) != self._before:
            self._stream.seek(0)
            if _digest(self._stream, self._name) != self._sha256:
                return False
            self._before = now
        return True

    def _state(self) -> tuple[int, ...]:
        status = os.fstat(self._stream.fileno())
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class _Fault(Exception):
    """Reason why a file is no safetensors file."""


def _digest(stream: BufferedReader, name: str) -> str:
    digest = hashlib.sha256()
    size = 0
    # What a file says of its size may be wrong: one may grow, and those of /proc say nothing.
    while chunk := stream.read(_CHUNK):
        size += len(chunk)
        if size > MAX_SIDECAR:
            raise ArtifactError(
                f"sidecar.file: {name} has more than {MAX_SIDECAR} bytes, the most that one may "
                f"have"
            )
        digest.update(chunk)
    return digest.hexdigest()


def _compare(name: str, stated: str, actual: str) -> None:
    if actual != stated:
        raise ArtifactError(
            f"sidecar.sha256: says {shorten(stated, 14)} but {name} gives {shorten(actual, 14)}: "
            "the sidecar was changed or belongs to another artifact; restore it or run the search "
            "again"
        )


def _entries(stream: BufferedReader) -> dict[str, Entry]:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > size - 8:
        raise _Fault(f"its header of {length} bytes does not fit into {size}")
    if length > MAX_HEADER:
        raise _Fault(f"its header has {length} bytes, a sidecar's may have {MAX_HEADER}")
    text = stream.read(length)
    # However names are spelled, these cannot be: what they hold together is bounded before it is
    # made.
    if (
        text.count(b"{") > MAX_ARRAYS + 2
        or text.count(b",") > 12 * MAX_ARRAYS
        or text.count(b"[") > 2 * MAX_ARRAYS + 2
    ):
        raise _Fault(f"it has more than {MAX_ARRAYS} arrays")
    if text.count(b'"') > 12 * MAX_ARRAYS:
        raise _Fault("its header has more names than its arrays can have")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise _Fault("its header is no JSON") from None
    if not isinstance(header, dict):
        raise _Fault("its header is no mapping")
    header.pop("__metadata__", None)
    entries = dict[str, Entry]()
    end = 8 + length
    for name, entry in sorted(header.items(), key=_begin):
        try:
            dtype = _DTYPES[entry["dtype"]]
            shape = tuple(entry["shape"])
            (begin, finish) = entry["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*shape, begin, finish))
        except (KeyError, TypeError, ValueError):
            raise _Fault(
                f"{shorten(name)} has not dtype, shape and data_offsets of an array"
            ) from None
        if whole and len(shape) <= MAX_DIMENSIONS:
            nbytes = prod(shape) * _size(dtype)
        else:
            nbytes = -1
        # No holes, no overlaps: as safetensors wants it.
        if (
            not whole
            or nbytes != finish - begin
            or begin + 8 + length != end
            or max(shape, default=0) > MAX_SIDECAR
        ):
            raise _Fault(
                f"{shorten(name)} of shape {shorten(shape)} does not lie from {begin!s:.20} to "
                f"{finish!s:.20}"
            )
        entries[name] = Entry(dtype=dtype, shape=shape, begin=end, nbytes=nbytes)
        end += nbytes
    if end != size:
        raise _Fault(f"its arrays end at {end}, the file at {size}")
    return entries


def _begin(item: tuple[str, Any]) -> tuple[int, int]:
    try:
        return int(item[1]["data_offsets"][0]), int(item[1]["data_offsets"][1])
    except (KeyError, IndexError, TypeError, ValueError):
        raise _Fault(
            f"{shorten(item[0])} has not dtype, shape and data_offsets of an array"
        ) from None


def _size(dtype: str) -> int:
    if dtype == "bool":
        return 1
    return int(dtype.lstrip("uintfloa")) // 8


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name is given twice")
    return made
