"""Runs a stream through every method, block by block; a killed run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from artifacts.files import atomic_write, check_writable, out_folder
from profiling.environment import environment
from profiling.ledger import Ledger, Unit
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import Phase, phase
from profiling.prompts.tokens import Encoder
from profiling.streams.config import Streamed, StreamMethod
from profiling.streams.methods import Cached, Recomputed, Stretch, blocks
from profiling.streams.report import Row, Series, draw, plain, rows
from profiling.streams.speed import speeds
from profiling.streams.tokens import TokenStream, stream_eval, text_stream

OUTPUT = "stream.json"


def run(config: Streamed, loaded: LoadedModel | None = None) -> tuple[list[Row], dict[str, Any]]:
    """Stream through every method into config.out; return its rows and the record.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    config = settled(config, loaded and loaded.model)
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
    """Make rows and record of a finished stream, time it where asked for, and write files."""
    whole = config.sinks + config.window
    if config.timed:
        seconds = speeds(loaded, config.all_methods, stream, whole, config.timed)
    else:
        seconds = {}
    figures = rows(series, stream, whole, config.task)
    record = {
        "command": config.command,
        **plain(series, figures),
        "timed": seconds,
        "settings": settings,
        "environment": environment(config.device),
    }
    atomic_write(config.out / OUTPUT, (json.dumps(record, indent=1) + "\n").encode())
    draw(config.out, series, stream, config.task, _caption(config, loaded, stream))
    ledger.remove()
    return figures, record


def _stream(config: Streamed, loaded: LoadedModel) -> TokenStream:
    encode = Encoder(loaded.tokenizer)
    if config.text is None:
        return stream_eval(encode, config.tokens, config.seed)
    return text_stream(encode, config.text, config.tokens, config.stride)


def _settings(config: Streamed, loaded: LoadedModel, stream: TokenStream) -> dict[str, Any]:
    """Collect all that makes two runs the same; not paths, command and methods."""
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
    if stream.repeats:
        again = f", begun again {stream.repeats} times"
    else:
        again = ""
    versions = ", ".join(f"{name} {value}" for name, value in environment(config.device).items())
    if config.task == "stream_eval":
        every = "at the answers"
    else:
        every = f"at one token in {config.stride}"
    if "recomputed" in config.methods:
        recomputed = f"; recomputed {every}"
    else:
        recomputed = ""
    return (
        f"{loaded.name}, {config.dtype} on {config.device}; {stream.name}, {stream.tokens} "
        f"tokens{again}; "
        f"{config.sinks} sinks and a window of {config.window}, {config.chunk} tokens at a time"
        f"{recomputed}\n{versions}\ndrawn: "
        f"{config.command}"
    )
