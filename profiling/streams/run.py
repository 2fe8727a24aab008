"""Runs a stream through every method, block by block; a killed run resumes."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch

from artifacts.files import atomic_write, check_writable, out_folder
from profiling.caches.parsing import parse_cache
from profiling.environment import environment
from profiling.finite import check_finite
from profiling.ledger import Ledger
from profiling.models.device import settled
from profiling.models.identity import identity_of
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import Phase, phase
from profiling.prompts.tokens import Encoder
from profiling.quality.method import of_policy
from profiling.streams.config import RECOMPUTED, StreamConfig
from profiling.streams.feed import (
    BlockStats,
    TokenStream,
    cached_blocks,
    recomputed_blocks,
    text_stream,
)
from profiling.streams.report import Row, Series, record, rows

OUTPUT = "stream.json"


def run(
    config: StreamConfig, loaded: LoadedModel | None = None
) -> tuple[list[Row], dict[str, Any]]:
    """Stream through every method, write OUTPUT in config.out, and return rows and record.

    Raises:
        HeadwiseError: a mistake of the user.
    """
    config = settled(config, loaded and loaded.model)
    with out_folder(config.out):
        check_writable(config.out / OUTPUT)
        loaded = loaded or load_model(
            config.model, dtype=config.dtype, device=config.device, revision=config.revision
        )
        stream = text_stream(Encoder(loaded.tokenizer), config.text, config.tokens, config.stride)
        settings = _settings(config, loaded, stream)
        with Ledger(
            config.out / OUTPUT,
            "stream",
            identity_of(loaded.model, loaded.name),
            settings=settings,
            fresh=config.fresh,
        ) as ledger:
            with phase("stream", config.tokens * len(config.methods), "tokens") as shown:
                series = [
                    _measured(config, loaded, name, stream, ledger, shown)
                    for name in config.methods
                ]
            figures = rows(series, stream, config.recompute)
            result = {
                "command": config.command,
                **record(series, figures),
                "settings": settings,
                "environment": environment(config.device),
            }
            atomic_write(config.out / OUTPUT, (json.dumps(result, indent=1) + "\n").encode())
            ledger.remove()
            return figures, result


def _settings(config: StreamConfig, loaded: LoadedModel, stream: TokenStream) -> dict[str, Any]:
    """Collect all that makes two runs the same; not paths, command and methods."""
    names = ("tokens", "recompute", "chunk", "stride", "dtype", "device")
    return {
        "model": loaded.name,
        "revision": loaded.revision,
        "stream": stream.name,
        "sha256": stream.sha256,
        "repeats": stream.repeats,
        **{name: getattr(config, name) for name in names},
        "block": config.block_size,
    }


def _measured(
    config: StreamConfig,
    loaded: LoadedModel,
    name: str,
    stream: TokenStream,
    ledger: Ledger,
    shown: Phase,
) -> Series:
    """Every block of one method: from the resume file, or measured and kept there."""
    shown.note(name)
    starts = range(0, stream.tokens, config.block_size)
    blocks = [(begin, min(begin + config.block_size, stream.tokens)) for begin in starts]
    units = [ledger.unit(f"{name} {number}") for number in range(len(blocks))]
    first = next((at for at, unit in enumerate(units) if unit not in ledger), len(units))
    if name != RECOMPUTED and first < len(units):
        # A cache is filled again from the start of the stream.
        first = 0
    shown.skip(sum(end - begin for begin, end in blocks[:first]))
    if name == RECOMPUTED:
        feed = recomputed_blocks(loaded, config.recompute, stream, blocks[first:])
    else:
        method = of_policy(loaded, name, parse_cache(name))
        feed = cached_blocks(loaded, method, stream, config.chunk, blocks[first:])
    with torch.inference_mode(), closing(feed):
        for number, stats in enumerate(feed, first):
            figures = (stats.nll, *stats.probed)
            check_finite(figures, f"block {number}: losses of {name} are", loaded.model)
            if units[number] not in ledger:
                ledger.put(units[number], asdict(stats))
            begin, end = blocks[number]
            shown.update(end - begin)
    return Series(
        method=name,
        ends=tuple(end for _, end in blocks),
        blocks=tuple(BlockStats(**ledger.get(unit)) for unit in units),
    )
