"""The header of a GGUF file: its fields and tensors, and a model split into several files."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from artifacts import HeadwiseError
from artifacts.errors import one_line

MAGIC = b"GGUF"
CHUNK = 1 << 22
# What `read_header` raises for a damaged file.
DAMAGED = (
    OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError, struct.error
)  # fmt: skip
# The format's types of a value by number: struct's letter of those of a fixed size, text, arrays.
_FIXED = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_TEXT = 8
_ARRAY = 9
# Longer arrays are a vocabulary's.
_LONGEST_ARRAY = 4096
_FLOAT32 = 0
_ALIGNMENT = 32
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: as torch has it.
        kind: number of its type in the format.
        offset: bytes from the start of the data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """Header of a GGUF file.

    Attributes:
        fields: numbers, booleans, texts, and short arrays of numbers by key.
        start: first byte of the fields.
        end: first byte after the fields.
        data: first byte of the tensors' data.
    """

    fields: dict[str, Any]
    tensors: tuple[Tensor, ...]
    start: int
    end: int
    data: int

    @property
    def elements(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(each.shape) for each in self.tensors)

    @property
    def alignment(self) -> int:
        """Bytes that the data and each tensor in it are aligned to."""
        return max(1, int(self.fields.get("general.alignment", _ALIGNMENT)))


def read_header(path: Path) -> Header:
    """Read the header of a little-endian GGUF file, without its vocabulary.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged; any of DAMAGED.
    """
    fields: dict[str, Any] = {}
    tensors = []
    with open(path, "rb") as file:
        magic, _, count, entries = _unpack(file, "4sIQQ")
        if magic != MAGIC:
            raise ValueError("it does not start with 'GGUF'")
        start = file.tell()
        for _ in range(entries):
            key = _text(file)
            (kind,) = _unpack(file, "I")
            value = _value(file, kind)
            if value is not None:
                fields[key] = value
        end = file.tell()
        for _ in range(count):
            name = _text(file)
            (dimensions,) = _unpack(file, "I")
            shape = _unpack(file, f"{dimensions}Q")
            tensors.append(Tensor(name, shape[::-1], *_unpack(file, "IQ")))
        header = Header(fields=fields, tensors=tuple(tensors), start=start, end=end, data=0)
        data = _aligned(file.tell(), header.alignment)
    return Header(fields=fields, tensors=header.tensors, start=start, end=end, data=data)


def read_floats(path: Path, header: Header, name: str) -> list[float] | None:
    """Read a small fp32 tensor of a GGUF file; None if the file does not have it.

    Raises:
        HeadwiseError: the tensor is no fp32.
    """
    for tensor in header.tensors:
        if tensor.name == name:
            if tensor.kind != _FLOAT32:
                raise HeadwiseError(f"its tensor {name} must be fp32, has type {tensor.kind}")
            with open(path, "rb") as file:
                file.seek(header.data + tensor.offset)
                data = file.read(4 * math.prod(tensor.shape))
            return [float(each) for each in np.frombuffer(data, dtype="<f4")]
    return None


def shards(path: Path) -> tuple[Path, ...]:
    """Return the files of a model in order, given any of them; the file alone if it is whole.

    A model split by llama.cpp's gguf-split has files NAME-00001-of-00003.gguf in one folder.

    Raises:
        HeadwiseError: a file is missing, or does not belong to the others.
    """
    try:
        count = read_header(path).fields.get("split.count", 1)
    # The readers of tokenizer and weights have the message about a damaged file.
    except DAMAGED:
        return (path,)
    if not isinstance(count, int) or count < 2:
        return (path,)
    shown = one_line(path.name)
    for named in (path, Path(os.path.realpath(path))):
        match = _SHARD.fullmatch(named.stem)
        if match and int(match[3]) == count:
            break
    else:
        raise HeadwiseError(
            f"{shown} is one of {count} files of a model: all must lie in one folder as "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    files = [
        named.with_name(f"{match[1]}-{number:05}-of-{count:05}{path.suffix}")
        for number in range(1, count + 1)
    ]
    missing = [file.name for file in files if not os.path.isfile(file)]
    if missing:
        raise HeadwiseError(
            f"{shown} is one of {count} files of a model, and {len(missing)} of them are missing "
            f"in its folder, first {one_line(missing[0])}"
        )
    _check_shards(files, shown)
    return tuple(files)


def _check_shards(files: Sequence[Path], shown: str) -> None:
    """Check that each file is the shard that its name says, and that they have all tensors."""
    names: list[str] = []
    total = None
    for number, file in enumerate(files):
        try:
            header = read_header(file)
        except DAMAGED as error:
            raise HeadwiseError(
                f"cannot read the GGUF file {one_line(file.name)}, one of {len(files)} files of "
                f"{shown}: {one_line(str(error))[:200]}"
            ) from error
        place = (header.fields.get("split.no"), header.fields.get("split.count"))
        if place != (number, len(files)):
            raise HeadwiseError(
                f"{one_line(file.name)} is no part {number + 1} of {len(files)}: its split.no and "
                f"split.count are {place[0]} and {place[1]}"
            )
        names += [tensor.name for tensor in header.tensors]
        total = header.fields.get("split.tensors.count", total)
    if len(set(names)) != len(names) or total not in (None, len(names)):
        raise HeadwiseError(
            f"the {len(files)} files of {shown} are not of one model: they have {len(set(names))} "
            f"tensors, split.tensors.count is {total}"
        )


def is_shard(path: Path) -> bool:
    """True if the file starts as a GGUF file does, False for a later piece of one."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def shard_name(stem: str) -> str:
    """Return the name of a model by the stem of its file, without the number of a shard."""
    match = _SHARD.fullmatch(stem)
    if match:
        return match[1]
    return stem


def join_shards(files: Sequence[Path], whole: Path) -> None:
    """Write one GGUF file with the fields of the first shard and the tensors of all."""
    headers = [read_header(file) for file in files]
    first = headers[0]
    table = io.BytesIO()
    bases = []
    base = 0
    for path, header in zip(files, headers, strict=True):
        bases.append(base)
        for tensor in header.tensors:
            name = tensor.name.encode()
            table.write(struct.pack("<Q", len(name)) + name)
            rank = len(tensor.shape)
            table.write(struct.pack(f"<I{rank}Q", rank, *tensor.shape[::-1]))
            table.write(struct.pack("<IQ", tensor.kind, base + tensor.offset))
        base = _aligned(base + path.stat().st_size - header.data, first.alignment)
    with open(whole, "wb") as joined:
        with open(files[0], "rb") as source:
            magic, version, _, entries = _unpack(source, "4sIQQ")
            count = sum(len(header.tensors) for header in headers)
            joined.write(struct.pack("<4sIQQ", magic, version, count, entries))
            joined.write(source.read(first.end - first.start))
        joined.write(table.getvalue())
        data = _aligned(joined.tell(), first.alignment)
        for path, header, base in zip(files, headers, bases, strict=True):
            joined.seek(data + base)
            with open(path, "rb") as source:
                source.seek(header.data)
                shutil.copyfileobj(source, joined, CHUNK)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = f"<{layout}"
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > CHUNK:
        raise ValueError(f"a text of {length} bytes")
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    """Read a value of this type; skip a long array and one of texts, and return None for it."""
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _unpack(file, _FIXED[kind])[0]
    inner, length = _unpack(file, "IQ")
    if inner in _FIXED and length <= _LONGEST_ARRAY:
        return list(_unpack(file, f"{length}{_FIXED[inner]}"))
    if inner in _FIXED:
        file.seek(struct.calcsize(f"<{_FIXED[inner]}") * length, io.SEEK_CUR)
    elif inner == _TEXT:
        for _ in range(length):
            (size,) = _unpack(file, "Q")
            file.seek(size, io.SEEK_CUR)
    else:
        for _ in range(length):
            _value(file, inner)
    return None
