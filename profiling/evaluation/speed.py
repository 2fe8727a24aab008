"""Speed of methods next to both dense attentions: prefill, attention, decode.

Every method's times are listed with those of dense attention in the same rounds, by the default
attention and by Headwise's kernel. Speeds of different rounds are never divided by each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import make_prompts
from profiling.quality.method import Method
from profiling.speed.baselines import KERNEL, MODEL, Speedup, speedup
from profiling.speed.latency import interleaved
from profiling.speed.layer_times import ANCHOR, SDPA, time_layers
from profiling.speed.layer_times import Timed as Asked
from runtime.devices import execution_device
from runtime.layers import make_plans
from runtime.memory import cache_bytes

_TASK = "passkey"
_SEED = 424_242


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of a method's rounds, and of both dense attentions in the same rounds.

    Attributes:
        steps: tokens of a round of decode.
        cache: bytes of the cache after the prompt.
    """

    seconds: tuple[float, ...]
    model: tuple[float, ...]
    kernel: tuple[float, ...]
    steps: int = 1
    cache: int = 0

    @property
    def median(self) -> float:
        """Seconds of a prefill, or of a token of decode."""
        return statistics.median(self.seconds) / self.steps

    @property
    def speedup(self) -> Speedup:
        """Speed-up over each dense attention."""
        return speedup(self.seconds, {MODEL: self.model, KERNEL: self.kernel})


def prompt_ids(loaded: LoadedModel, length: int) -> torch.Tensor:
    """A prompt to time, (1, length), the same for every method."""
    prompt = make_prompts(_TASK, loaded.tokenizer, length=length, samples=1, seed=_SEED)[0]
    return torch.tensor([prompt.input_ids], device=execution_device(loaded.model), dtype=torch.long)


@torch.no_grad()
def prefill_times(
    loaded: LoadedModel, methods: Sequence[Method], length: int, *, repeats: int
) -> dict[str, Timed]:
    """Time to the first token of a prompt; both dense attentions must be among the methods."""
    model = loaded.model
    ids = prompt_ids(loaded, length)
    current: list[Any] = []

    def entering(method: Method) -> Callable[[], AbstractContextManager[object]]:
        def enter() -> AbstractContextManager[object]:
            current[:] = [method.cache(model)]
            return method.apply(model)

        return enter

    def run() -> None:
        model(ids, past_key_values=current[0], use_cache=True, logits_to_keep=1)

    seconds = interleaved(
        {m.name: entering(m) for m in methods},
        run,
        repeats=repeats,
        device=str(execution_device(model)),
    )
    return {m.name: Timed(seconds=tuple(seconds[m.name]), **_dense(seconds)) for m in methods}


def _dense(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {"model": tuple(seconds[MODEL]), "kernel": tuple(seconds[KERNEL])}


def attention_seconds(
    loaded: LoadedModel, methods: Sequence[Method], length: int
) -> dict[str, float]:
    """Time one prompt's attention alone, index builds included, by patterns and densely.

    Over the layers for which all of these methods have patterns; nothing where there are none.
    """
    served = {method.name: method.headwise for method in methods if method.headwise is not None}
    plans = {name: make_plans(each.artifact) for name, each in served.items()}
    layers = sorted(set.intersection(*(set(each) for each in plans.values())))
    if not layers:
        return {}
    request = Asked(tokens=length, plans=plans, sdpa=True)
    (timings,) = time_layers(loaded, prompt_ids(loaded, length)[0].tolist(), [request], layers)
    dense = {SDPA: MODEL, ANCHOR: KERNEL}
    return {dense.get(name, name): seconds for name, seconds in timings.seconds.items()}


@torch.no_grad()
def decode_times(
    loaded: LoadedModel, methods: Sequence[Method], length: int, *, steps: int, repeats: int
) -> dict[str, Timed]:
    """Time `steps` tokens after a prompt; both dense attentions must be among the methods."""
    model = loaded.model
    ids = prompt_ids(loaded, length)
    caches = {}
    held = {}
    for method in methods:
        with method.apply(model):
            caches[method.name] = method.cache(model)
            model(ids, past_key_values=caches[method.name], use_cache=True, logits_to_keep=1)
        held[method.name] = cache_bytes(caches[method.name]).device
    current: list[Any] = []
    token = ids[:, -1:]

    def entering(method: Method) -> Callable[[], AbstractContextManager[object]]:
        def enter() -> AbstractContextManager[object]:
            current[:] = [caches[method.name]]
            return method.apply(model)

        return enter

    def run() -> None:
        for _ in range(steps):
            model(token, past_key_values=current[0], use_cache=True)

    seconds = interleaved(
        {m.name: entering(m) for m in methods},
        run,
        repeats=repeats,
        device=str(execution_device(model)),
    )
    return {
        m.name: Timed(
            seconds=tuple(seconds[m.name]), steps=steps, cache=held[m.name], **_dense(seconds)
        )
        for m in methods
    }
