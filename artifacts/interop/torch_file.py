"""A .pt file of one tensor, read and written without torch: a zip of a pickle that describes it, and its bytes.

The pickle may name what a tensor is made of and nothing else; nothing in it is called.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from math import prod
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, shorten
from artifacts.interop.source import MAX_BYTES

if TYPE_CHECKING:
    from artifacts.sidecar import Array

_DTYPES = {"HalfStorage": "<f2", "BFloat16Storage": "<u2", "FloatStorage": "<f4", "DoubleStorage": "<f8"}
_MEMBERS = 16


class _Unpickler(pickle.Unpickler):
    """Gives the parts of a tensor's description as they stand there."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *parts: parts
        if (module, name) == ("collections", "OrderedDict"):
            return lambda *nothing: None
        if module == "torch" and name in _DTYPES:
            return name
        raise pickle.UnpicklingError(f"names {shorten(f'{module}.{name}')}, which is no part of a tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_tensor(data: bytes) -> Array:
    """The tensor as float64.

    Raises:
        ArtifactError: the file is no .pt of one tensor of fp16, bf16, fp32 or fp64.
    """
    import numpy as np

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            if len(names) > _MEMBERS:
                raise ValueError(f"holds {len(names)} files")
            root = next(name.removesuffix("data.pkl") for name in names if name.endswith("data.pkl"))
            storage, offset, shape, stride = _Unpickler(io.BytesIO(_member(archive, f"{root}data.pkl"))).load()[:4]
            _, dtype, key, _, count = storage
            raw = np.frombuffer(_member(archive, f"{root}data/{key}"), dtype=_DTYPES[dtype])
        sizes = (*shape, *stride, offset, count)
        plain = tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
        if not all(type(size) is int and 0 <= size <= MAX_BYTES for size in sizes) or stride != plain:
            raise ValueError("the tensor is not laid out row by row")
        raw = raw[offset : offset + prod(shape)].reshape(shape)
    except (pickle.UnpicklingError, zipfile.BadZipFile, struct.error, ValueError, TypeError, KeyError, IndexError,
            AttributeError, EOFError, StopIteration, OSError,
            NotImplementedError, RuntimeError, OverflowError, MemoryError, UnicodeError) as error:  # fmt: skip
        raise ArtifactError(f"is no .pt file of one tensor: {shorten(str(error), 120)}") from None
    if dtype == "BFloat16Storage":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float64)


def write_tensor(values: Array) -> bytes:
    """A .pt file of the values: in bf16 where that holds them exactly, else in fp16, else in fp32."""
    import numpy as np

    single = np.ascontiguousarray(values, dtype=np.float32)
    upper = (single.view(np.uint32) >> 16).astype("<u2")
    if (single == (upper.astype(np.uint32) << 16).view(np.float32)).all():
        storage, raw = "BFloat16Storage", upper.tobytes()
    elif (single == single.astype(np.float16)).all():
        storage, raw = "HalfStorage", single.astype("<f2").tobytes()
    else:
        storage, raw = "FloatStorage", single.astype("<f4").tobytes()
    where = b"(" + _text("storage") + f"ctorch\n{storage}\n".encode() + _text("0") + _text("cpu") + _int(single.size)
    layout = _int(0) + _ints(single.shape) + _ints(tuple(prod(single.shape[at + 1 :]) for at in range(single.ndim)))
    described = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + where + b"tQ" + layout
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in (
            ("data.pkl", described + b"\x89ccollections\nOrderedDict\n)RtR."),
            ("byteorder", b"little"),
            ("data/0", raw),
            ("version", b"3\n"),
        ):
            # Without a time of its own: the same values give the same bytes.
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return stream.getvalue()


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as member:
        data = member.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"unpacks to more than {MAX_BYTES} bytes")
    return data


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _int(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


def _ints(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, numbers)) + b"t"
