"""GGUF files: the name inside, tokenizer and configuration, and weights converted once."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from artifacts import HeadwiseError
from artifacts.cli import command
from artifacts.errors import one_line
from profiling.models.cache import made_once

_MAGIC = b"GGUF"
_CHUNK = 1 << 22
# The format's types of a value by number: bytes of those of a fixed size, text, and arrays.
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT = 8
_ARRAY = 9
# Of a model's name, in characters.
_LONGEST_NAME = 100
# Part of the key: increment it if a conversion writes different files than before.
_FORMAT = 1


@dataclass(frozen=True)
class Header:
    """Header of a GGUF file.

    Attributes:
        name: `general.name`; None if it is not set.
        elements: numbers in all tensors.
    """

    name: str | None
    elements: int


def model_name(file: Path) -> str:
    """Name a model by `general.name` of its GGUF file, or by the file where that is not set.

    Spaces and other characters that a file's name may not have become hyphens:
    "Qwen2.5 Coder 0.5B Instruct" is Qwen2.5-Coder-0.5B-Instruct.
    """
    try:
        name = read_header(file).name or ""
    # The readers of tokenizer and weights have the message about a damaged file.
    except (OSError, ValueError, KeyError, OverflowError, RecursionError, struct.error):
        name = ""
    slug = re.sub(r"[^\w.+]+", "-", name).strip("-.")[:_LONGEST_NAME]
    return slug or file.stem


def read_header(path: Path) -> Header:
    """Read the header of a little-endian GGUF file, without its vocabulary.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged; so is one that raises KeyError, OverflowError,
            RecursionError or struct.error.
    """
    name = None
    elements = 0
    with open(path, "rb") as file:
        magic, _, tensors, entries = _unpack(file, "4sIQQ")
        if magic != _MAGIC:
            raise ValueError("it does not start with 'GGUF'")
        for _ in range(entries):
            key = _text(file)
            (kind,) = _unpack(file, "I")
            if key == "general.name" and kind == _TEXT:
                name = _text(file)
            else:
                _skip(file, kind)
        for _ in range(tensors):
            _text(file)
            (dimensions,) = _unpack(file, "I")
            shape = _unpack(file, f"{dimensions}Q")
            _unpack(file, "IQ")
            size = 1
            for extent in shape:
                size *= extent
            elements += size
    return Header(name, elements)


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = f"<{layout}"
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > _CHUNK:
        raise ValueError(f"a text of {length} bytes")
    return file.read(length).decode()


def _skip(file: BinaryIO, kind: int) -> None:
    """Move behind a value of this type."""
    if kind == _TEXT:
        (length,) = _unpack(file, "Q")
        file.seek(length, io.SEEK_CUR)
    elif kind == _ARRAY:
        inner, length = _unpack(file, "IQ")
        if inner in _BYTES:
            file.seek(_BYTES[inner] * length, io.SEEK_CUR)
        else:
            for _ in range(length):
                _skip(file, inner)
    else:
        file.seek(_BYTES[kind], io.SEEK_CUR)


def read_tokenizer(parts: Sequence[Path]) -> Any:
    """Read the tokenizer of a GGUF file, in `parts`.

    Raises:
        HeadwiseError: it cannot be read.
    """
    from transformers import AutoTokenizer

    with _place(parts) as place, _readable(parts):
        return AutoTokenizer.from_pretrained(**place)


def read_config(parts: Sequence[Path]) -> Any:
    """Read the model's configuration in a GGUF file, in `parts`.

    Raises:
        HeadwiseError: it cannot be read.
    """
    from transformers import AutoConfig

    with _place(parts) as place, _readable(parts):
        return AutoConfig.from_pretrained(**place)


def converted(parts: Sequence[Path], *, name: str, dtype: str) -> Path:
    """Convert a GGUF file, in `parts`, into a folder with weights in `dtype` and tokenizer.

    Args:
        parts: the file, or its split files in order.
        name: of the model, for messages.
        dtype: of the weights, by torch's name.

    Raises:
        HeadwiseError: the file cannot be read or converted, or the cache folder cannot be written.
    """
    with _readable(parts):
        _check_start(parts)
        key = f"{_sha256(parts)[:32]}-{dtype}-{_FORMAT}"
    return made_once(
        "models", key, lambda folder: _convert(parts, folder, name=name, dtype=dtype), name=name
    )


def _convert(parts: Sequence[Path], folder: Path, *, name: str, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.mkdir()
    with _place(parts, folder.parent) as place:
        with _readable(parts):
            whole = Path(place["pretrained_model_name_or_path"], place["gguf_file"])
            size = read_header(whole).elements * getattr(torch, dtype).itemsize
        if command.verbosity >= 0:
            print(
                f"converting {name} from GGUF to {dtype} once; the cache {folder.parent} grows by "
                f"{size / 2**30:.2f} GiB",
                file=sys.stderr,
                flush=True,
            )
        with _readable(parts), _quiet():
            model = AutoModelForCausalLM.from_pretrained(
                **place,
                dtype=getattr(torch, dtype),
                quantization_config=GgufConfig(dequantize=True),
            )
            tokenizer = AutoTokenizer.from_pretrained(**place)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _place(parts: Sequence[Path], scratch: Path | None = None) -> Iterator[dict[str, str]]:
    """Arguments for transformers to read a GGUF file; parts are joined in a scratch folder."""
    if len(parts) == 1:
        yield _arguments(parts[0])
        return
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        whole = Path(folder) / "model.gguf"
        with open(whole, "wb") as joined:
            for part in parts:
                with open(part, "rb") as file:
                    shutil.copyfileobj(file, joined, _CHUNK)
        yield _arguments(whole)


def _arguments(file: Path) -> dict[str, str]:
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show the conversion's progress bar only on a terminal: it has no switch for it."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _readable(parts: Sequence[Path]) -> Iterator[None]:
    """Turn whatever a reader raises on a bad file into one line."""
    file = one_line(parts[0].name)
    try:
        yield
    except HeadwiseError:
        raise
    except ImportError as error:
        raise HeadwiseError(
            f"the GGUF file {file} needs the package gguf: pip install 'headwise[search]'"
        ) from error
    # A damaged header can send the readers anywhere: wrong offsets, sizes, keys, encodings.
    except Exception as error:
        lines = str(error).strip().splitlines()
        if lines:
            reason = one_line(lines[0])[:200]
        else:
            reason = type(error).__name__
        raise HeadwiseError(f"cannot read the GGUF file {file}: {reason}") from error


def _check_start(parts: Sequence[Path]) -> None:
    with open(parts[0], "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise HeadwiseError(
                f"{one_line(parts[0].name)} is no GGUF file: it does not start with 'GGUF'"
            )


def _sha256(parts: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        with open(part, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
