"""Methods of decode, and seconds of a step by each, interleaved.

Shapes: B batch (1 here), G KV heads, K context, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from profiling.models.loading import LoadedModel
from profiling.progress import bar
from profiling.quality.method import Method
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL
from profiling.speed.latency import interleaved
from runtime import LoadedArtifact
from runtime.devices import execution_device
from runtime.layers import heads_of, text_config

# Tokens that are prefilled at a time.
_CHUNK = 2048


def methods(headwise: LoadedArtifact | None, offloads: Sequence[str]) -> list[Method]:
    """Both dense attentions, and the artifact with each way to keep keys that are not chosen."""
    both = [
        Method(name=name, make=lambda: None, identity="", dense=name) for name in (MODEL, KERNEL)
    ]
    if headwise is None:
        return both
    return both + [
        Method(
            name=HEADWISE if offload == "auto" else f"{HEADWISE}, {offload}",
            make=lambda: headwise,
            identity=headwise.artifact.content_sha256 or "",
            offload=offload,
            check_weights=True,
        )
        for offload in offloads
    ]


@torch.no_grad()
def filled(
    loaded: LoadedModel, methods: Sequence[Method], *, context: int, seed: int
) -> dict[str, Any]:
    """Each method's cache of one sequence with that context, by the method's name."""
    caches = {}
    for method in methods:
        with method.apply(loaded.model):
            caches[method.name] = method.cache(loaded.model)
            if method.evicts:
                _prefill(loaded.model, caches[method.name], context, seed)
            else:
                fill(loaded.model, caches[method.name], context, seed)
    return caches


@torch.no_grad()
def step_seconds(
    loaded: LoadedModel,
    methods: Sequence[Method],
    caches: Mapping[str, Any],
    *,
    context: int,
    steps: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Time `steps` tokens of one sequence, the methods interleaved."""
    model = loaded.model
    current: list[Any] = []

    def entering(method: Method) -> Callable[[], AbstractContextManager[object]]:
        def enter() -> AbstractContextManager[object]:
            cache = caches[method.name]
            extra = cache.get_seq_length() - context
            if extra and not method.evicts:
                cache.crop(-extra)
            current[:] = [
                cache,
                torch.zeros(1, 1, dtype=torch.long, device=execution_device(model)),
            ]
            return method.apply(model)

        return enter

    def decode() -> None:
        cache, tokens = current
        for _ in range(steps):
            model(tokens, past_key_values=cache, use_cache=True)

    contexts = {method.name: entering(method) for method in methods}
    return interleaved(contexts, decode, repeats=repeats, device=str(execution_device(model)))


def _prefill(model: Any, cache: Any, context: int, seed: int) -> None:
    """Random tokens into a cache that drops some, in chunks, as a serving engine does."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (1, context), generator=generator, device="cpu").to(
        execution_device(model)
    )
    for part in bar(ids.split(_CHUNK, dim=1), desc=f"prefill {context}"):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)


def fill(model: Any, cache: Any, context: int, seed: int) -> None:
    """Fill every layer with random keys and values (1, G, K, D), the same for every method."""
    config = text_config(model)
    heads, kv_heads = heads_of(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator(execution_device(model)).manual_seed(seed)
    for layer in range(config.num_hidden_layers):
        k, v = (
            torch.randn(
                1,
                kv_heads,
                context,
                head_dim,
                generator=generator,
                device=execution_device(model),
                dtype=model.dtype,
            )
            for _ in range(2)
        )
        cache.update(k, v, layer)
