"""headwise stream: perplexity over an endless text, by the cache (StreamingLLM).

    headwise stream --model smollm2 --text book.txt --tokens 20000 --out stream/

Each --policy names a KV cache, as in headwise decode: `full` keeps every token, `streaming` the
first tokens and a window, `h2o` the heavy hitters and a window. `recomputed` is the
baseline: for each token a forward over the last --recompute tokens from scratch, measured at one
token in --stride. A full or streaming cache gives the same for any --chunk. Rerun a killed command
to resume: finished blocks of tokens are kept, and the caches are filled again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from artifacts import HeadwiseError
from artifacts.cli.arguments import Device, Dtype, Fresh, ModelName, Out, Revision
from artifacts.cli.interrupt import while_importing
from artifacts.cli.options import ADVANCED, Arg, CommandConfig
from artifacts.errors import shorten
from artifacts.files import atomic_write, check_writable, out_folder
from artifacts.page.layout import aligned
from profiling.caches.parsing import CACHES, parse_cache
from profiling.environment import environment
from profiling.finite import check_finite
from profiling.ledger import Ledger
from profiling.progress import Phase, phase

if TYPE_CHECKING:
    from profiling.models.loading import LoadedModel
    from profiling.token_stream import Row, Series, TokenStream

RECOMPUTED = "recomputed"
OUTPUT = "stream.json"
_POLICIES = ("full", "streaming:sinks=4,window=1020")
# Tokens of a block, which is a job of the resume file, and the most blocks of a long stream.
_BLOCK = 1024
_BLOCKS = 200
_MIB = 2**20
_QUARTERS = ("1st quarter", "2nd", "3rd", "4th")


class Config(CommandConfig):
    """Options of a stream."""

    model: ModelName
    out: Annotated[Out, Arg("folder for stream.json", metavar="FOLDER")]
    tokens: Annotated[int, Arg("length of the stream"), Field(ge=2)]
    text: Annotated[Path, Arg("text file; repeated if it is shorter than the stream")]
    policies: Annotated[
        tuple[str, ...],
        Arg(
            f"KIND or KIND:FIELD=VALUE,..., repeatable: caches to compare (default "
            f"{' and '.join(_POLICIES)}); kinds: {CACHES}",
            repeat=True,
            flags=("--policy",),
        ),
    ] = ()
    recompute: Annotated[
        int, Arg("window of the method that recomputes it for each token, 0 for none"), Field(ge=0)
    ] = 1024
    chunk: Annotated[int, Arg("tokens of a forward pass", group=ADVANCED), Field(ge=1)] = 256
    block: Annotated[
        int | None,
        Arg(
            "tokens of a mean and of a job in the resume file (default 1024 or more)",
            group=ADVANCED,
        ),
        Field(ge=1),
    ] = None
    stride: Annotated[
        int, Arg("recompute at one token in so many", group=ADVANCED), Field(ge=1)
    ] = 16
    dtype: Dtype = "auto"
    device: Device = "auto"
    revision: Revision = None
    fresh: Fresh = False
    command: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not os.path.isfile(self.text):
            raise HeadwiseError(f"there is no text file {shorten(str(self.text), 200)}")
        for text in self.policies:
            parse_cache(text)
            if self.policies.count(text) > 1:
                raise HeadwiseError(f"--policy {text} is given twice")
        return self

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all methods: policies as typed, then the recomputed window."""
        return (self.policies or _POLICIES) + (RECOMPUTED,) * (self.recompute > 0)

    @property
    def block_size(self) -> int:
        """Tokens of a block: whole chunks."""
        size = self.block or max(_BLOCK, -(-self.tokens // _BLOCKS))
        return -(-size // self.chunk) * self.chunk


def run(config: Config) -> int:
    """Stream through every method, and print the table."""
    rows, record = measure(config)
    print(table(rows))
    if repeats := record["settings"]["repeats"]:
        print(f"the text is shorter than the stream: it was repeated {repeats} times")
    if RECOMPUTED in config.methods:
        print(
            f"recomputed: at one token in {config.stride}; ratios are over those past the window "
            f"of {config.recompute}"
        )
    print(f"wrote {config.out / OUTPUT}")
    return 0


def measure(config: Config, loaded: LoadedModel | None = None) -> tuple[list[Row], dict[str, Any]]:
    """Stream through every method, write OUTPUT in config.out, and return rows and record.

    Raises:
        HeadwiseError: a mistake of the user.
    """
    with while_importing():
        from profiling.models.device import settled
        from profiling.models.identity import identity_of
        from profiling.models.loading import load_model
        from profiling.prompts.tokens import Encoder
        from profiling.token_stream import row_of, text_stream
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
                    _measure_method(config, loaded, name, stream, ledger, shown)
                    for name in config.methods
                ]
            base = next((each for each in series if each.method == RECOMPUTED), None)
            rows = [row_of(each, base, stream, config.recompute) for each in series]
            record = {
                "command": config.command,
                "rows": [asdict(row) for row in rows],
                "blocks": {each.method: each.means() for each in series},
                "settings": settings,
                "environment": environment(config.device),
            }
            atomic_write(config.out / OUTPUT, (json.dumps(record, indent=1) + "\n").encode())
            ledger.remove()
            return rows, record


def _settings(config: Config, loaded: LoadedModel, stream: TokenStream) -> dict[str, Any]:
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


def _measure_method(
    config: Config,
    loaded: LoadedModel,
    name: str,
    stream: TokenStream,
    ledger: Ledger,
    shown: Phase,
) -> Series:
    """Every block of one method: from the resume file, or measured and kept there."""
    import torch

    from profiling.quality.method import of_policy
    from profiling.token_stream import BlockStats, Series, cached_blocks, recomputed_blocks

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


def table(rows: Sequence[Row]) -> str:
    """Align the rows as text."""
    lines = [["", "perplexity", *_QUARTERS, "/ recomputed", "ms/token", "cache MiB"]]
    for row in rows:
        perplexities = (row.perplexity, *row.quarters)
        quality = ["-" if value is None else f"{value:.2f}" for value in perplexities]
        size = "-" if row.cache_bytes is None else f"{row.cache_bytes / _MIB:.1f}"
        lines.append([row.method, *quality, _ratio(row), f"{1e3 * row.token_seconds:.2f}", size])
    return "\n".join(aligned(lines))


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    if row.low is None:
        return f"{row.ratio:.3f}"
    return f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f})"
