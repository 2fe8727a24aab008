"""Time of one token of every method that holds a bounded number of tokens, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from profiling.caches.policies import with_policy
from profiling.models.loading import LoadedModel
from profiling.speed.latency import interleaved
from profiling.streams.config import StreamMethod
from profiling.streams.tokens import TokenStream

SPEED_ROUNDS = 5
# Tokens fed at a time to fill the caches.
_CHUNK = 256


@torch.inference_mode()
def speeds(
    loaded: LoadedModel,
    methods: Sequence[StreamMethod],
    stream: TokenStream,
    whole: int,
    tokens: int,
) -> dict[str, list[float]]:
    """Time `tokens` fed to a full cache, or one forward over `whole` tokens, per token."""
    ids = torch.tensor([stream.ids[: whole + 1]], device=loaded.model.device, dtype=torch.long)
    current: list[Callable[[], None]] = []
    contexts = {}
    counts = {}
    for method in methods:
        if method.whole is not None:
            contexts[method.name] = _recomputing(loaded, ids, current)
            counts[method.name] = 1
            if not method.recomputed:
                contexts[method.name] = _decoding(loaded, method, ids, tokens, current)
                counts[method.name] = tokens
    seconds = interleaved(
        contexts, lambda: current[0](), repeats=SPEED_ROUNDS, device=str(loaded.model.device)
    )
    return {name: [value / counts[name] for value in values] for name, values in seconds.items()}


Enter = Callable[[], AbstractContextManager[object]]


def _recomputing(
    loaded: LoadedModel, ids: torch.Tensor, current: list[Callable[[], None]]
) -> Enter:
    def forward() -> None:
        loaded.model(ids[:, 1:], use_cache=False, logits_to_keep=1)

    @contextmanager
    def enter() -> Iterator[None]:
        current[:] = [forward]
        yield

    return enter


def _decoding(
    loaded: LoadedModel,
    method: StreamMethod,
    ids: torch.Tensor,
    tokens: int,
    current: list[Callable[[], None]],
) -> Enter:
    model = loaded.model
    headwise = with_policy(loaded, method.policy)
    cache = headwise.new_cache(model)
    with headwise.apply(model, strict=True):
        for part in ids.split(_CHUNK, dim=1):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def decode() -> None:
        for at in range(tokens):
            at %= ids.shape[1]
            model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)

    @contextmanager
    def enter() -> Iterator[None]:
        with headwise.apply(model, check_weights=False, strict=True):
            current[:] = [decode]
            yield

    return enter
