"""Feeds a token stream through a cache or a recomputed window (StreamingLLM, Figures 3 and 10).

Shapes: Q tokens of a chunk.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from profiling.models.loading import LoadedModel
from profiling.prompts.texts import read_ids
from profiling.prompts.tokens import Encoder
from profiling.quality.forced import token_losses
from profiling.quality.method import Method
from runtime.devices import execution_device
from runtime.memory import cache_bytes

Block = tuple[int, int]
"""Half-open span of tokens that are fed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenStream:
    """Tokens 0 to N, of which all but the last are fed, each to predict the next.

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
        """Number of tokens that are fed."""
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
    """Feed the blocks, which begin at token 0, through one cache, `chunk` tokens at a time."""
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
