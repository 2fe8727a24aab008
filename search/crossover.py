"""From which length on an artifact's patterns are faster than dense attention, by measuring prefills."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from kernels.index import TILE
from profiling.models.loading import LoadedModel
from profiling.speed.latency import interleaved, medians, prefill
from runtime import Headwise
from search.attention_time import all_threads

_ROUNDS = 3
_SHARES = (1 / 2, 1 / 4, 1 / 8)
_SHORTEST = 256


def measured_dense_below(loaded: LoadedModel, headwise: Headwise, length: int) -> int:
    """The shortest of a half, a quarter and an eighth of `length` from which on sparse prefills are faster.

    headwise: serves every length. `length` itself where not even a half is faster.
    """
    below = length
    for share in _SHARES:
        tokens = round(length * share) // TILE * TILE
        if tokens < _SHORTEST or not _faster(loaded, headwise, tokens):
            return below
        below = tokens
    return below


def _faster(loaded: LoadedModel, headwise: Headwise, length: int) -> bool:
    model = loaded.model
    # What a prompt says decides where its patterns lie, not how many tiles they have.
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(model.get_input_embeddings().weight.shape[0], (1, length), generator=generator)
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "dense": nullcontext,
        "sparse": lambda: headwise.apply(model, check_weights=False),
    }
    ids = ids.to(model.device)
    with all_threads():
        taken = medians(interleaved(contexts, lambda: prefill(model, ids), repeats=_ROUNDS, device=str(model.device)))
    return taken["sparse"] < taken["dense"]
