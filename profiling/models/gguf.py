"""Converts a GGUF file once into a folder that transformers loads in a moment."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from artifacts import HeadwiseError
from artifacts.errors import one_line
from profiling.models.cache import made_once

_MAGIC = b"GGUF"
_CHUNK = 1 << 22
# Part of the key: raise it when a conversion gives other files than before.
_FORMAT = 1


def converted(parts: Sequence[Path], *, name: str, dtype: str) -> Path:
    """Convert a GGUF file, in `parts`, into a folder with weights in `dtype` and tokenizer.

    Raises:
        HeadwiseError: the file cannot be read or converted, or the cache folder cannot be written.
    """
    with _readable(name):
        if _start(parts[0]) != _MAGIC:
            raise HeadwiseError(f"{name} is no GGUF file: it does not start with 'GGUF'")
        key = f"{_sha256(parts)[:32]}-{dtype}-{_FORMAT}"
    return made_once(
        "models", key, lambda folder: _convert(parts, folder, name=name, dtype=dtype), name=name
    )


def _convert(parts: Sequence[Path], folder: Path, *, name: str, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.mkdir()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        if len(parts) == 1:
            whole = parts[0]
        else:
            whole = _joined(parts, Path(scratch) / "model.gguf")
        place = {"pretrained_model_name_or_path": str(whole.parent), "gguf_file": whole.name}
        with _readable(name), _quiet():
            model = AutoModelForCausalLM.from_pretrained(
                **place,
                dtype=getattr(torch, dtype),
                quantization_config=GgufConfig(dequantize=True),
            )
            tokenizer = AutoTokenizer.from_pretrained(**place)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The conversion's progress bar only for a person to see: it has no switch of its own."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Whatever a reader makes of a bad file, its user gets one line."""
    try:
        yield
    except HeadwiseError:
        raise
    # A damaged header can send the readers anywhere: wrong offsets, sizes, keys, encodings.
    except Exception as error:
        lines = str(error).strip().splitlines()
        if lines:
            reason = one_line(lines[0])[:200]
        else:
            reason = type(error).__name__
        raise HeadwiseError(f"cannot read the GGUF file {name}: {reason}") from error


def _start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(_MAGIC))


def _sha256(parts: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        with open(part, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _joined(parts: Sequence[Path], target: Path) -> Path:
    with open(target, "wb") as whole:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, whole, _CHUNK)
    return target
