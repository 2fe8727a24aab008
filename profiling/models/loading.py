"""Loads any causal language model of transformers whose attention Headwise can reach."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from artifacts import HeadwiseError
from artifacts.cli.arguments import DTYPES
from artifacts.errors import one_line, shorten
from profiling.inside.capture import capture
from profiling.models.completeness import complete_model
from profiling.models.device import check_device, default_dtype, resolve_device
from profiling.models.gguf import converted, model_name, read_config, read_tokenizer
from profiling.models.gguf_header import shards
from profiling.models.packages import PACKAGES, package_files, package_revision
from runtime.devices import execution_device


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode with its tokenizer.

    Attributes:
        name: as its user called it, without folders.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Location of a model.

    Attributes:
        name: name of the model in reports and artifacts.
        revision: revision of a hub id or a package.
        place: folder or hub id that transformers loads from; None for a GGUF file.
        gguf: the GGUF file, or its parts in order.
        on_hub: True for a hub id.
    """

    name: str
    revision: str | None = None
    place: str | None = None
    gguf: tuple[Path, ...] = ()
    on_hub: bool = False


def load_model(
    spec: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    revision: str | None = None,
    max_memory: int | None = None,
) -> LoadedModel:
    """Load a causal language model.

    Args:
        spec: `smollm2` or `gemma3` (from their packages), a GGUF file (*.gguf), a local folder
            (write `./smollm2` for one of that name) or a hub id. Code that comes with a model is
            never run.
        dtype: bfloat16, float16 or float32, or bf16, fp16, fp32; auto is default_dtype(device).
        device: as torch names it: cpu, cuda, cuda:1; auto is the GPU where torch sees one.
        revision: branch, tag or commit, of a hub id only.
        max_memory: bytes of weights that stay on the device; the other layers come in one at a
            time, from the CPU's memory or, on the CPU, from the files (accelerate's offload).
            None: all stay.

    Raises:
        HeadwiseError: one line for all that can be wrong with the above, and for a model that is
            not causal or has no attention that goes through transformers' AttentionInterface.
    """
    device = resolve_device(device)
    if dtype == "auto":
        dtype = default_dtype(device)
    else:
        dtype = DTYPES.get(dtype, dtype)
    if dtype not in DTYPES.values():
        raise HeadwiseError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES.values())}")
    check_device(device)
    with _quiet():
        source = _find(spec, revision)
        model, tokenizer = _load(source, dtype, _placement(device, max_memory))
    model = (model if max_memory else model.to(device)).eval()
    if (embeddings := model.get_input_embeddings().weight).is_meta:
        mebibytes = embeddings.nbytes / 2**20
        raise HeadwiseError(
            f"--max-memory of {max_memory:,} bytes is too little for {source.name}: its embeddings "
            f"take {mebibytes:.0f} MiB"
        )
    check_attention(model, source.name)
    return LoadedModel(model, tokenizer, source.name, source.revision or commit_of(model))


def check_attention(model: Any, name: str) -> None:
    """Raise HeadwiseError for a model whose attention cannot be reached, or is not causal.

    Two tokens reveal an error that a long prompt would reveal only after minutes.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=execution_device(model))
    try:
        capture(model, tokens, lambda inputs: None)
    # A HeadwiseError, or accelerate's of a weight of another shape in the files.
    except ValueError as error:
        raise HeadwiseError(f"cannot use {name}: {one_line(str(error))}") from None


def load_tokenizer(spec: str, *, revision: str | None = None) -> Any:
    """Load the tokenizer of a model alone, without its weights.

    Arguments and errors are those of load_model.
    """
    from transformers import AutoTokenizer

    return _without_weights(spec, revision, AutoTokenizer.from_pretrained, read_tokenizer)


def load_config(spec: str, *, revision: str | None = None) -> Any:
    """Load the configuration of a model alone, without its weights.

    Arguments and errors are those of load_model.
    """
    from transformers import AutoConfig

    return _without_weights(spec, revision, AutoConfig.from_pretrained, read_config)


def name_of(spec: str, *, revision: str | None = None) -> str:
    """Return the name that load_model assigns, without loading the model; same errors."""
    return _find(spec, revision).name


def _without_weights(
    spec: str,
    revision: str | None,
    load: Callable[..., Any],
    read: Callable[[Sequence[Path]], Any],
) -> Any:
    """Load a part of a model by transformers, or read it in a GGUF file."""
    with _quiet():
        source = _find(spec, revision)
        if source.gguf:
            return read(source.gguf)
        options = _options(source)
        with _one_line_of(source, options):
            return load(source.place, **options)


def local_folder(package: str, *, dtype: str) -> str:
    """The folder with a model of PACKAGES as transformers reads it; converted at first use."""
    dtype = DTYPES.get(dtype, dtype)
    if dtype == "auto":
        dtype = default_dtype(resolve_device("auto"))
    return str(converted(package_files(package), name=package, dtype=dtype))


def _find(spec: str, revision: str | None) -> _Source:
    path = Path(os.path.expanduser(spec))
    local = (
        spec in PACKAGES or path.suffix == ".gguf" or os.path.exists(path) or _looks_like_path(spec)
    )
    if local and revision is not None:
        raise HeadwiseError(
            f"--revision {revision} is for a model on the hub, {shorten(spec)} is not from there"
        )
    if spec in PACKAGES:
        files = tuple(package_files(spec))
        return _Source(name=spec, revision=package_revision(spec), gguf=files)
    if path.suffix == ".gguf":
        if not os.path.isfile(path):
            raise HeadwiseError(f"unknown model {shorten(spec)}: there is no such file")
        files = shards(path)
        return _Source(name=model_name(files[0]), gguf=files)
    if local:
        _check_folder(path, spec)
        return _Source(name=Path(os.path.realpath(path)).name, place=str(path))
    return _Source(name=spec, revision=revision, place=spec, on_hub=True)


def _looks_like_path(spec: str) -> bool:
    return (
        not spec
        or spec.startswith((".", "~", os.sep))
        or spec.endswith(os.sep)
        or spec.count("/") > 1
    )


def _check_folder(path: Path, spec: str) -> None:
    if not os.path.exists(path) or not spec:
        raise HeadwiseError(f"unknown model {shorten(spec)}: there is no such folder")
    if not os.path.isdir(path):
        raise HeadwiseError(f"unknown model {shorten(spec)}: neither a folder nor a .gguf file")
    if not os.path.isfile(path / "config.json"):
        raise HeadwiseError(
            f"the folder {shorten(spec)} is no model for transformers: it has no config.json"
        )


def _placement(device: str, max_memory: int | None) -> dict[str, Any]:
    """Return arguments for transformers that limit the bytes of weights on a device."""
    if max_memory is None:
        return {}
    at = torch.device(device)
    where: dict[Any, int] = {"cpu": max_memory}
    if at.type != "cpu":
        where = {
            at.index or 0: max_memory,
            "cpu": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }
    return {"device_map": "auto", "max_memory": where}


def _load(source: _Source, dtype: str, placement: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options = _options(source)
    place = source.place or str(converted(source.gguf, name=source.name, dtype=dtype))
    with _one_line_of(source, options):
        config = AutoConfig.from_pretrained(place, **options)
    if type(config) not in AutoModelForCausalLM._model_mapping or config.is_encoder_decoder:
        raise HeadwiseError(f"{source.name} ({config.model_type}) is not a causal language model")
    with _one_line_of(source, options):
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        model = complete_model(place, dtype=getattr(torch, dtype), **placement, **options)
    if source.gguf:
        # Else the folder of the conversion, whose name is a hash.
        model.name_or_path = source.name
    return model, tokenizer


def _options(source: _Source) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": False}
    if source.on_hub:
        options |= {"revision": source.revision, "local_files_only": not _hub_reachable()}
    return options


@contextlib.contextmanager
def _one_line_of(source: _Source, options: dict[str, Any]) -> Iterator[None]:
    """Turn transformers' many errors into one line; RuntimeError is one of wrong shapes."""
    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        ImportError,
        RuntimeError,
        SafetensorError,
    ) as error:
        reason = one_line(next(iter(str(error).strip().splitlines()), type(error).__name__))[:250]
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own, which Headwise never runs"
        elif source.on_hub and isinstance(error, OSError):
            why = reason
            if options["local_files_only"]:
                why = "the hub cannot be reached and its cache does not have it"
            raise HeadwiseError(
                f"unknown model {shorten(source.name)}: no folder of that name, no package "
                f"({', '.join(PACKAGES)}), "
                f"and on the hub: {why}"
            ) from error
        raise HeadwiseError(f"cannot load the model {shorten(source.name)}: {reason}") from error


def _hub_reachable() -> bool:
    """True if the hub can be asked; without a network its client retries for half a minute."""
    from huggingface_hub import constants

    host = urllib.parse.urlparse(constants.ENDPOINT).hostname
    if constants.HF_HUB_OFFLINE or host is None:
        return False
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def commit_of(model: Any) -> str | None:
    """The commit on the hub that a model was loaded from."""
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        return str(commit)
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show transformers' progress bars on a terminal only, and no line of accelerate's."""
    from transformers.utils import logging

    getLogger("accelerate.big_modeling").setLevel(ERROR)

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
