"""Methods of decode, and the seconds of a step by each: on a cache of random keys and values, in turn.

Shapes: B batch (1 here), G KV heads, K context, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from profiling.caches.policies import CacheKind, with_policy
from profiling.models.loading import LoadedModel
from profiling.speed.baselines import KERNEL, MODEL, dense
from profiling.speed.latency import interleaved
from runtime import Headwise
from runtime.layers import heads_of, text_config
from runtime.memory import CacheBytes, cache_bytes


@dataclass(eq=False)
class Method:
    """How a method attends, and the cache that it decodes with. artifact: its content; "" of what has none."""

    name: str
    apply: Callable[[], AbstractContextManager[Any]]
    cache: Callable[[], Any]
    sparse: bool = False
    artifact: str = ""


def methods(loaded: LoadedModel, artifacts: Mapping[str, Headwise], offloads: Sequence[str]) -> list[Method]:
    """Both dense attentions, and each artifact with each way to keep keys that are not chosen."""
    from transformers import DynamicCache

    model = loaded.model
    config = text_config(model)
    both = [Method(name, partial(dense, model, name), lambda: DynamicCache(config=config)) for name in (MODEL, KERNEL)]
    return both + [
        Method(
            name if offload == "auto" else f"{name}, {offload}",
            partial(headwise.apply, model, strict=True),
            partial(headwise.new_cache, model, offload=offload),
            sparse=True,
            artifact=headwise.artifact.content_sha256 or "",
        )
        for name, headwise in artifacts.items()
        for offload in offloads
    ]


def of_cache(loaded: LoadedModel, name: str, kind: CacheKind) -> Method:
    """A cache under a policy, with dense prefill."""
    headwise = with_policy(loaded, kind.policy)
    return Method(
        name, partial(headwise.apply, loaded.model, strict=True), lambda: kind.changed(headwise.new_cache(loaded.model))
    )


@torch.no_grad()
def step_seconds(
    loaded: LoadedModel, methods: Sequence[Method], *, context: int, steps: int, repeats: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, CacheBytes]]:
    """Seconds of `steps` tokens in turn, and the bytes of each method's cache."""
    model = loaded.model
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    caches = {}
    for method in methods:
        with method.apply():
            caches[method.name] = method.cache()
            fill(model, caches[method.name], context, seed)
    current: list[Any] = []

    def entering(method: Method) -> Callable[[], AbstractContextManager[object]]:
        def enter() -> AbstractContextManager[object]:
            current[:] = [caches[method.name]]
            if extra := current[0].get_seq_length() - context:
                current[0].crop(-extra)
            return method.apply()

        return enter

    def decode() -> None:
        for step in range(steps):
            position = torch.tensor([[context + step]], device=model.device)
            model(token, position_ids=position, past_key_values=current[0], use_cache=True)

    contexts = {method.name: entering(method) for method in methods}
    seconds = interleaved(contexts, decode, repeats=repeats, device=str(model.device))
    return seconds, {name: cache_bytes(cache) for name, cache in caches.items()}


def fill(model: Any, cache: Any, context: int, seed: int) -> None:
    """Random keys and values (1, G, K, D) in every layer, the same for every method, as a long prefill leaves them."""
    config = text_config(model)
    heads, kv_heads = heads_of(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator(model.device).manual_seed(seed)
    for layer in range(config.num_hidden_layers):
        k, v = (
            torch.randn(1, kv_heads, context, head_dim, generator=generator, device=model.device, dtype=model.dtype)
            for _ in range(2)
        )
        cache.update(k, v, layer)
