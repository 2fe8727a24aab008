"""Runs a stream through every method, block by block, with a ledger that it goes on by after a
kill."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.options import arg, at_least, check_ranges, option, shared
from artifacts.errors import shorten
from artifacts.files import atomic_write, check_writable, out_folder
from profiling.environment import environment
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel, load_model, settled
from profiling.progress import Phase, phase
from profiling.prompts.tokens import Encoder
from profiling.streams.methods import (
    METHODS,
    Cached,
    Recomputed,
    StreamMethod,
    Stretch,
    blocks,
    method_of,
)
from profiling.streams.report import Row, Series, draw, plain, rows
from profiling.streams.speed import speeds
from profiling.streams.tokens import TokenStream, stream_eval, text_stream

TASKS = ("text", "stream_eval")
OUTPUT = "stream.json"
# Tokens of a block, which is a unit of the ledger, and the most blocks of a long stream.
_BLOCK = 1024
_BLOCKS = 200


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """What to stream and how; `timed`: tokens of each round that are timed one by one, 0 for
    none."""

    model: str = shared(arguments.add_model)
    out: Path = shared(
        arguments.add_out, "folder for stream.json, .csv, .png and .svg", metavar="FOLDER"
    )
    tokens: int = arg("--tokens", help="length of the stream", within=at_least(2))
    text: Path | None = option(
        "text file; begun again where it is shorter than the stream", default=None
    )
    task: str = shared(
        arguments.add_task,
        f"one of {', '.join(TASKS)} (default text)",
        several=False,
        default="text",
    )
    sinks: int = option("first tokens that are kept", default=4, within=at_least(0))
    window: int = option("last tokens that are kept", default=1020, within=at_least(1))
    methods: tuple[str, ...] = arg(
        "--methods",
        nargs="+",
        default=METHODS,
        help=f"any of {', '.join(METHODS)}, streaming:SINKS",
    )
    chunk: int = option("tokens fed at a time", default=256, within=at_least(1), advanced=True)
    block: int | None = option(
        "tokens of a mean and of a unit of the ledger (default 1024 or more)",
        default=None,
        within=at_least(1),
        advanced=True,
    )
    stride: int = option(
        "recomputed at every so many tokens", default=16, within=at_least(1), advanced=True
    )
    timed: int = option(
        "tokens of a round timed one by one", default=0, within=at_least(0), advanced=True
    )
    seed: int = shared(arguments.add_seed, help="of stream_eval", default=0)
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="cpu")
    revision: str | None = shared(arguments.add_revision, default=None)
    fresh: bool = shared(arguments.add_fresh, default=False)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.timed and self.tokens < self.sinks + self.window:
            raise HeadwiseError(
                f"--timed needs a full cache: give at least {self.sinks + self.window} --tokens, "
                f"got {self.tokens}"
            )
        if self.task not in TASKS:
            raise HeadwiseError(f"unknown task {shorten(self.task)}; known: {', '.join(TASKS)}")
        if (self.task == "text") != (self.text is not None):
            raise HeadwiseError("the task 'text' needs --text FILE, and stream_eval takes none")
        if self.text is not None and not self.text.is_file():
            raise HeadwiseError(f"there is no text file {shorten(str(self.text), 200)}")
        if not self.methods:
            raise HeadwiseError(f"no method given; known: {', '.join(METHODS)}, streaming:SINKS")
        for name in self.methods:
            if self.methods.count(name) > 1:
                raise HeadwiseError(f"the method {name!r} is given twice")
            method_of(name, sinks=self.sinks, window=self.window)

    @property
    def size(self) -> int:
        """Tokens of a block: whole chunks."""
        size = self.block or max(_BLOCK, -(-self.tokens // _BLOCKS))
        return -(-size // self.chunk) * self.chunk

    @property
    def all_methods(self) -> list[StreamMethod]:
        return [method_of(name, sinks=self.sinks, window=self.window) for name in self.methods]


def run(config: Streamed, loaded: LoadedModel | None = None) -> tuple[list[Row], dict[str, Any]]:
    """Stream through every method; its rows, and what is needed to repeat them. Files are written
    to config.out.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    config = settled(config)
    with out_folder(config.out):
        check_writable(config.out / OUTPUT)
        loaded = loaded or load_model(
            config.model, dtype=config.dtype, device=config.device, revision=config.revision
        )
        stream = _stream(config, loaded)
        settings = _settings(config, loaded, stream)
        with Ledger(config.out / OUTPUT, "stream", settings=settings, fresh=config.fresh) as ledger:
            with phase("stream", config.tokens * len(config.methods), "tokens") as shown:
                series = [
                    _measured(config, loaded, method, stream, ledger, shown)
                    for method in config.all_methods
                ]
            return _written(config, loaded, stream, series, settings, ledger)


def _written(
    config: Streamed,
    loaded: LoadedModel,
    stream: TokenStream,
    series: Sequence[Series],
    settings: dict[str, Any],
    ledger: Ledger,
) -> tuple[list[Row], dict[str, Any]]:
    """Rows and record of a stream that is through; time it where that is asked for, and write what
    was found."""
    whole = config.sinks + config.window
    seconds = (
        speeds(loaded, config.all_methods, stream, whole, config.timed) if config.timed else {}
    )
    found = rows(series, stream, whole, config.task)
    record = {
        "command": config.command,
        **plain(series, found),
        "timed": seconds,
        "settings": settings,
        "environment": environment(config.device),
    }
    atomic_write(config.out / OUTPUT, (json.dumps(record, indent=1) + "\n").encode())
    draw(config.out, series, stream, config.task, _caption(config, loaded, stream))
    ledger.remove()
    return found, record


def _stream(config: Streamed, loaded: LoadedModel) -> TokenStream:
    encode = Encoder(loaded.tokenizer)
    if config.text is None:
        return stream_eval(encode, config.tokens, config.seed)
    return text_stream(encode, config.text, config.tokens, config.stride)


def _settings(config: Streamed, loaded: LoadedModel, stream: TokenStream) -> dict[str, Any]:
    """What makes two runs the same; paths, the command and which methods are asked for are not
    among it."""
    names = ("tokens", "task", "sinks", "window", "chunk", "stride", "seed", "dtype", "device")
    values = {name: getattr(config, name) for name in names}
    return {
        "model": loaded.name,
        "revision": loaded.revision,
        "stream": stream.name,
        "sha256": stream.sha256,
        "repeats": stream.repeats,
        **values,
        "block": config.size,
    }


def _measured(
    config: Streamed,
    loaded: LoadedModel,
    method: StreamMethod,
    stream: TokenStream,
    ledger: Ledger,
    shown: Phase,
) -> Series:
    """Every block of one method: out of the ledger, or measured and put there."""
    shown.note(method.name)
    parts = list(blocks(stream.tokens, config.size))
    units = [ledger.unit(f"{method.name} {number}") for number in range(len(parts))]
    if all(unit in ledger for unit in units):
        shown.skip(stream.tokens)
    else:
        with torch.inference_mode():
            _measure(config, loaded, method, stream, ledger, parts, units, shown)
    return Series(
        method=method.name,
        ends=tuple(end for _, end in parts),
        stretches=tuple(Stretch(**ledger.get(unit)) for unit in units),
    )


def _measure(
    config: Streamed,
    loaded: LoadedModel,
    method: StreamMethod,
    stream: TokenStream,
    ledger: Ledger,
    parts: Sequence[tuple[int, int]],
    units: Sequence[Unit],
    shown: Phase,
) -> None:
    done = 0
    runner: Cached | Recomputed
    if method.recomputed:
        runner = Recomputed(loaded, method, stream)
        done = next((number for number, unit in enumerate(units) if unit not in ledger), len(units))
    else:
        # A cache is fed again from the stream's start.
        runner = Cached(loaded, method, stream, config.chunk)
    with runner.applied():
        for number, (begin, end) in enumerate(parts):
            if number >= done:
                made = runner.feed(begin, end)
                if units[number] not in ledger:
                    ledger.put(units[number], made.plain())
                shown.update(end - begin)
            else:
                shown.skip(end - begin)


def _caption(config: Streamed, loaded: LoadedModel, stream: TokenStream) -> str:
    again = f", begun again {stream.repeats} times" if stream.repeats else ""
    versions = ", ".join(f"{name} {value}" for name, value in environment(config.device).items())
    every = "at the answers" if config.task == "stream_eval" else f"at one token in {config.stride}"
    return (
        f"{loaded.name}, {config.dtype} on {config.device}; {stream.name}, {stream.tokens} "
        f"tokens{again}; "
        f"{config.sinks} sinks and a window of {config.window}, {config.chunk} tokens at a time"
        f"{f'; recomputed {every}' if 'recomputed' in config.methods else ''}\n{versions}\ndrawn: "
        f"{config.command}"
    )
