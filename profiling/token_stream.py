"""A token stream through a cache or a recomputed window (StreamingLLM, Figures 3 and 10).

Shapes: Q tokens of a chunk.
"""

from __future__ import annotations

import hashlib
import math
import time
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from profiling.evaluation.intervals import share_of
from profiling.models.loading import LoadedModel
from profiling.prompts.text_files import read_ids
from profiling.prompts.tokens import Encoder
from profiling.quality.forced import token_losses
from profiling.quality.method import Method
from runtime.devices import execution_device
from runtime.memory import cache_bytes

Block = tuple[int, int]
"""Half-open span of input tokens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenStream:
    """Tokens 0 to N, of which all but the last are input, each to predict the next.

    Attributes:
        ids: N + 1 token ids.
        probes: tokens that every method predicts: methods are compared on them.
        name: of the text.
        repeats: how often the text was repeated.
    """

    ids: tuple[int, ...]
    probes: tuple[int, ...]
    name: str
    repeats: int = 0

    @property
    def tokens(self) -> int:
        """Number of input tokens."""
        return len(self.ids) - 1

    @property
    def sha256(self) -> str:
        """Over the ids, in hexadecimal."""
        return hashlib.sha256(array("q", self.ids).tobytes()).hexdigest()


def text_stream(encode: Encoder, file: Path, tokens: int, stride: int) -> TokenStream:
    """Return the first tokens of a text, repeated where it ends; one token in `stride` is a probe.

    Raises:
        HeadwiseError: the file is empty, or not UTF-8 text.
    """
    text = read_ids(encode, file)
    ids = list(encode.prefix)
    times = -(-max(tokens + 1 - len(ids), 0) // len(text))
    ids += text * times
    return TokenStream(
        ids=tuple(ids[: tokens + 1]),
        probes=tuple(range(stride, tokens + 1, stride)),
        name=f"text:{file.name}",
        repeats=max(times - 1, 0),
    )


@dataclass(kw_only=True)
class BlockStats:
    """Figures of a method on one block.

    Attributes:
        nll: sum of -log p of the predicted tokens.
        tokens: number of predicted tokens.
        seconds: wall time of the block.
        probed: -log p of each probe.
        cache_bytes: keys and values at the end; None without a cache.
    """

    nll: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    probed: list[float] = field(default_factory=list)
    cache_bytes: int | None = None


def cached_blocks(
    loaded: LoadedModel, method: Method, stream: TokenStream, chunk: int, blocks: Sequence[Block]
) -> Generator[BlockStats, None, None]:
    """Run the blocks, which start at token 0, through one cache, `chunk` tokens at a time."""
    model = loaded.model
    stream_ids = torch.tensor([stream.ids], device=execution_device(model), dtype=torch.long)
    cache = method.cache(model)
    with method.apply(model):
        for begin, end in blocks:
            chunks = []
            start = time.perf_counter()
            for at in range(begin, end, chunk):
                stop = min(at + chunk, end)
                ids = stream_ids[:, at:stop]
                logits = model(ids, past_key_values=cache, use_cache=True).logits[0]
                chunks.append(token_losses(logits, stream_ids[0, at + 1 : stop + 1]))
            # Reading the losses waits for the device.
            losses = torch.cat(chunks).cpu()
            seconds = time.perf_counter() - start
            places = [token - begin - 1 for token in stream.probes if begin < token <= end]
            yield BlockStats(
                nll=float(losses.double().sum()),
                tokens=end - begin,
                seconds=seconds,
                probed=[round(value, 5) for value in losses[places].tolist()],
                cache_bytes=cache_bytes(cache).device,
            )


def recomputed_blocks(
    loaded: LoadedModel, window: int, stream: TokenStream, blocks: Sequence[Block]
) -> Generator[BlockStats, None, None]:
    """Predict the probes of each block, each by a forward over the `window` tokens before it."""
    model = loaded.model
    stream_ids = torch.tensor([stream.ids], device=execution_device(model), dtype=torch.long)
    for begin, end in blocks:
        stats = BlockStats()
        for probe in stream.probes:
            if not begin < probe <= end:
                continue
            start = time.perf_counter()
            ids = stream_ids[:, max(0, probe - window) : probe]
            logits = model(ids, use_cache=False, logits_to_keep=1).logits[0]
            loss = float(token_losses(logits, stream_ids[0, probe : probe + 1]))
            stats.seconds += time.perf_counter() - start
            stats.tokens += 1
            stats.nll += loss
            stats.probed.append(round(loss, 5))
        yield stats


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method's figures; None where they were not measured.

    Attributes:
        method: its name.
        perplexity: over all tokens; of the recomputed window over the probes.
        quarters: the same of each quarter of the stream, by the ends of blocks.
        ratio: of perplexities on the probes past the window, to the recomputed window's.
        low: lower bound of its 95% interval by Student's t. Segments of the stream as long as the
            window are the samples; fewer than two have no bounds.
        high: upper bound.
        token_seconds: of each input token, or of each forward of the recomputed window.
        cache_bytes: keys and values at the end.
    """

    method: str
    perplexity: float
    quarters: tuple[float | None, ...]
    ratio: float | None
    low: float | None
    high: float | None
    token_seconds: float
    cache_bytes: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Series:
    """One method's figures block by block.

    Attributes:
        method: its name.
        ends: where each block ends, in tokens.
        blocks: figures of each.
    """

    method: str
    ends: tuple[int, ...]
    blocks: tuple[BlockStats, ...]

    @property
    def probed(self) -> np.ndarray:
        """-log p of each probe."""
        return np.array([value for block in self.blocks for value in block.probed])

    def perplexity(self, start: float, end: float) -> float | None:
        """Perplexity of the blocks that end in (start, end]; None where there are none."""
        pairs = zip(self.ends, self.blocks, strict=True)
        within = [block for at, block in pairs if start < at <= end]
        count = sum(block.tokens for block in within)
        if not count:
            return None
        return _exp(sum(block.nll for block in within) / count)

    def means(self) -> dict[str, list[float | int | None]]:
        """Means of each block by name; None where nothing was measured in it."""
        blocks = self.blocks
        return {
            "end": list(self.ends),
            "nll": [
                round(block.nll / block.tokens, 5) if block.tokens else None for block in blocks
            ],
            "token_seconds": [
                float(f"{block.seconds / block.tokens:.4g}") if block.tokens else None
                for block in blocks
            ],
            "cache_bytes": [block.cache_bytes for block in blocks],
        }


def row_of(series: Series, base: Series | None, stream: TokenStream, window: int) -> Row:
    """Make the row of a method.

    Args:
        series: figures of the method.
        base: figures of the recomputed window; None if it was not measured.
        stream: the token stream.
        window: tokens of the recomputed window.
    """
    low = high = ratio = None
    if base is not None and series is not base:
        ratio, low, high = _ratio_to(series, base, stream, window)
    quarter = stream.tokens / 4
    count = max(1, sum(block.tokens for block in series.blocks))
    return Row(
        method=series.method,
        perplexity=_exp(sum(block.nll for block in series.blocks) / count),
        quarters=tuple(series.perplexity(at * quarter, (at + 1) * quarter) for at in range(4)),
        ratio=ratio,
        low=low,
        high=high,
        token_seconds=sum(block.seconds for block in series.blocks) / count,
        cache_bytes=series.blocks[-1].cache_bytes,
    )


def _ratio_to(
    series: Series, base: Series, stream: TokenStream, window: int
) -> tuple[float | None, float | None, float | None]:
    """Ratio of perplexities on the probes past the window, with its 95% interval over segments."""
    token = np.array(stream.probes, dtype=int)
    past = token > window
    if not past.any():
        return None, None, None
    difference = (series.probed - base.probed)[past]
    segment = token[past] // window
    segments, counts = np.unique(segment, return_counts=True)
    sums = [float(difference[segment == each].sum()) for each in segments]
    interval = share_of(sums, counts.tolist())
    if not interval.is_known:
        return math.exp(interval.value), None, None
    return math.exp(interval.value), math.exp(interval.low), math.exp(interval.high)


def _exp(nll: float) -> float:
    if nll < 700:
        return math.exp(nll)
    return math.inf
