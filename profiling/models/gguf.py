"""GGUF files: the name inside, tokenizer and configuration, and weights converted once."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.cli import command
from artifacts.errors import one_line
from profiling.models.cache import made_once
from profiling.models.completeness import complete_model
from profiling.models.gguf_config import FACTORS, completed
from profiling.models.gguf_header import (
    CHUNK,
    DAMAGED,
    MAGIC,
    Header,
    is_shard,
    join_shards,
    read_header,
    shard_name,
)

# Of a model's name, in characters.
_LONGEST_NAME = 100
# Part of the key: increment it if a conversion writes different files than before.
_FORMAT = 2


def model_name(file: Path) -> str:
    """Name a model by `general.name` of its GGUF file, or by the file where that is not set.

    Spaces and other characters that a file's name may not have become hyphens:
    "Qwen2.5 Coder 0.5B Instruct" is Qwen2.5-Coder-0.5B-Instruct.
    """
    try:
        name = str(read_header(file).fields.get("general.name", ""))
    # The readers of tokenizer and weights have the message about a damaged file.
    except DAMAGED:
        name = ""
    slug = re.sub(r"[^\w.+]+", "-", name).strip("-.")[:_LONGEST_NAME]
    return slug or shard_name(file.stem)


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
    with _place(parts) as place, _readable(parts):
        return _config(place)


def converted(parts: Sequence[Path], *, name: str, dtype: str) -> Path:
    """Convert a GGUF file, in `parts`, into a folder with weights in `dtype` and tokenizer.

    Args:
        parts: the file, or its split files in order.
        name: of the model, for messages.
        dtype: of the weights, by torch's name.

    Raises:
        HeadwiseError: the file cannot be read or converted, or the cache folder cannot be written.
    """
    import transformers

    with _readable(parts):
        _check_start(parts)
        version = transformers.__version__
        key = f"{_sha256(parts)[:32]}-{dtype}-{_FORMAT}-transformers-{version}"
    return made_once(
        "models", key, lambda folder: _convert(parts, folder, name=name, dtype=dtype), name=name
    )


def _convert(parts: Sequence[Path], folder: Path, *, name: str, dtype: str) -> None:
    import torch
    from transformers import AutoTokenizer, GgufConfig

    folder.mkdir()
    with _place(parts, folder.parent) as place:
        with _readable(parts):
            header = read_header(_whole(place))
            config = _config(place)
            size = header.elements * getattr(torch, dtype).itemsize
        if command.verbosity >= 0:
            print(
                f"converting {name} from GGUF to {dtype} once; the cache {folder.parent} grows by "
                f"{size / 2**30:.2f} GiB",
                file=sys.stderr,
                flush=True,
            )
        with _readable(parts), _quiet():
            model = complete_model(
                **place,
                config=config,
                dtype=getattr(torch, dtype),
                quantization_config=GgufConfig(dequantize=True),
            )
            _check_tensors(model, header)
            tokenizer = AutoTokenizer.from_pretrained(**place)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _config(place: dict[str, str]) -> Any:
    """Read the configuration, with what transformers leaves out."""
    from transformers import AutoConfig

    whole = _whole(place)
    return completed(AutoConfig.from_pretrained(**place), whole, read_header(whole))


def _check_tensors(model: Any, header: Header) -> None:
    """Raise HeadwiseError if the file has tensors that are not in the model.

    transformers' older loader skips those without a word.
    """
    state = model.state_dict()
    tied = {each.data_ptr(): each.numel() for each in state.values()}
    loaded = sum(tied.values())
    drafts = header.fields.get(f"{header.fields['general.architecture']}.nextn_predict_layers", 0)
    prefixes = tuple(f"blk.{model.config.num_hidden_layers + at}." for at in range(drafts))
    present = [
        each
        for each in header.tensors
        if each.name not in FACTORS and not each.name.startswith(prefixes)
    ]
    stored = sum(math.prod(each.shape) for each in present)
    if stored != loaded:
        raise HeadwiseError(
            f"its {len(present)} tensors have {stored:,} numbers, the model has {loaded:,}: "
            "transformers does not know all of them"
        )


@contextlib.contextmanager
def _place(parts: Sequence[Path], scratch: Path | None = None) -> Iterator[dict[str, str]]:
    """Arguments for transformers to read a GGUF file; parts are joined in a scratch folder."""
    if len(parts) == 1:
        yield _arguments(parts[0])
        return
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        whole = Path(folder) / "model.gguf"
        with _readable(parts):
            if is_shard(parts[1]):
                join_shards(parts, whole)
            else:
                _join_pieces(parts, whole)
        yield _arguments(whole)


def _join_pieces(parts: Sequence[Path], whole: Path) -> None:
    with open(whole, "wb") as joined:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, joined, CHUNK)


def _arguments(file: Path) -> dict[str, str]:
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def _whole(place: dict[str, str]) -> Path:
    return Path(place["pretrained_model_name_or_path"], place["gguf_file"])


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
    except HeadwiseError as error:
        raise HeadwiseError(f"cannot use the GGUF file {file}: {error}") from error
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
        if file.read(len(MAGIC)) != MAGIC:
            raise HeadwiseError("it does not start with 'GGUF'")


def _sha256(parts: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        with open(part, "rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
