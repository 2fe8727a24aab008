"""Speed of methods next to both dense attentions: prefill, attention, decode.

Shapes: G KV heads, D head dim; batches are of one sequence.

Every method's times are listed with those of dense attention in the same rounds, by the default
attention and by Headwise's kernel. Speeds of different rounds are never divided by each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.patterns import LayerPlan
from profiling.models.loading import LoadedModel
from profiling.progress import bar
from profiling.prompts.prompt import Task, make_prompts
from profiling.quality.method import Method
from profiling.speed.baselines import KERNEL, MODEL, Speedup, speedup
from profiling.speed.latency import time_calls
from profiling.speed.layer_times import ANCHOR, SDPA, PlansToTime, time_layers
from runtime.devices import execution_device
from runtime.layers import heads_of, make_plans, text_config
from runtime.memory import cache_bytes

_TASK = Task("passkey")
_SEED = 424_242
# Tokens of a random prompt that are prefilled at a time.
_CHUNK = 2048


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of a method's rounds, and of both dense attentions in the same rounds.

    Attributes:
        steps: tokens of a round of decode.
        cache: bytes of the cache before the first round, on the model's device.
        bank: bytes of keys and values in CPU memory.
    """

    seconds: tuple[float, ...]
    model: tuple[float, ...]
    kernel: tuple[float, ...]
    steps: int = 1
    cache: int = 0
    bank: int = 0

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
    loaded: LoadedModel, methods: Sequence[Method], *, length: int, repeats: int
) -> dict[str, Timed]:
    """Time to the first token of a prompt; both dense attentions must be among the methods."""
    model = loaded.model
    ids = prompt_ids(loaded, length)
    current: list[Any] = []

    def enter(method: Method) -> AbstractContextManager[object]:
        current[:] = [method.cache(model)]
        return method.apply(model)

    def run() -> None:
        model(ids, past_key_values=current[0], use_cache=True, logits_to_keep=1)

    seconds = _interleaved(model, methods, enter, run, repeats)
    return {each.name: Timed(**_rounds(seconds, each.name)) for each in methods}


def shared_layers(methods: Sequence[Method]) -> list[int]:
    """The layers for which all of these methods have patterns."""
    layers = [set(plans) for plans in _plans(methods).values()]
    if not layers:
        return []
    return sorted(set.intersection(*layers))


def attention_seconds(
    loaded: LoadedModel, methods: Sequence[Method], length: int, layers: Sequence[int]
) -> dict[str, float]:
    """Time one prompt's attention alone, index builds included, by patterns and densely.

    Args:
        loaded: the model.
        methods: with patterns in all of `layers`.
        length: of the prompt, in tokens.
        layers: the layers to sum over.
    """
    plans = _plans(methods)
    request = PlansToTime(tokens=length, plans=plans, sdpa=True)
    (timings,) = time_layers(loaded, prompt_ids(loaded, length)[0].tolist(), [request], layers)
    dense = {SDPA: MODEL, ANCHOR: KERNEL}
    return {dense.get(name, name): seconds for name, seconds in timings.seconds.items()}


def _plans(methods: Sequence[Method]) -> dict[str, dict[int, LayerPlan]]:
    """Plans by layer of each method that has an artifact, by its name."""
    served = {method.name: method.headwise for method in methods if method.headwise is not None}
    return {name: make_plans(each.artifact) for name, each in served.items()}


@torch.no_grad()
def decode_times(
    loaded: LoadedModel,
    methods: Sequence[Method],
    *,
    fill: Callable[[Method, Any], None],
    length: int,
    steps: int,
    repeats: int,
) -> dict[str, Timed]:
    """Time `steps` tokens of one sequence; both dense attentions must be among the methods.

    Args:
        loaded: the model.
        methods: the methods to time, interleaved.
        fill: puts `length` tokens into a method's new cache, with the method applied.
        length: tokens in the cache before each round.
        steps: tokens of a round.
        repeats: timed rounds.
    """
    model = loaded.model
    caches = {}
    held = {}
    for method in methods:
        with method.apply(model):
            caches[method.name] = method.cache(model)
            fill(method, caches[method.name])
        held[method.name] = cache_bytes(caches[method.name])
    current: list[Any] = []
    token = torch.zeros(1, 1, dtype=torch.long, device=execution_device(model))

    def enter(method: Method) -> AbstractContextManager[object]:
        cache = caches[method.name]
        extra = cache.get_seq_length() - length
        if extra and not _forgets(method, cache):
            cache.crop(-extra)
        current[:] = [cache]
        return method.apply(model)

    def run() -> None:
        for _ in range(steps):
            model(token, past_key_values=current[0], use_cache=True)

    seconds = _interleaved(model, methods, enter, run, repeats)
    return {
        each.name: Timed(
            **_rounds(seconds, each.name),
            steps=steps,
            cache=held[each.name].device,
            bank=held[each.name].bank,
        )
        for each in methods
    }


def _forgets(method: Method, cache: Any) -> bool:
    """True if tokens have left the cache for good, so that it cannot be cut back."""
    return (
        method.drops
        or _has_states(cache)
        or any(
            layer.is_sliding and layer.get_seq_length() >= layer.sliding_window
            for layer in cache.layers
        )
    )


def _has_states(cache: Any) -> bool:
    """True if some layers, of convolutions or linear attention, have a state in place of keys."""
    return not all(hasattr(layer, "keys") for layer in cache.layers)


def prompted(loaded: LoadedModel, length: int, method: Method, cache: Any) -> None:
    """Fill a cache by the prefill of a prompt."""
    ids = prompt_ids(loaded, length)
    loaded.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def at_random(loaded: LoadedModel, length: int, seed: int, method: Method, cache: Any) -> None:
    """Fill a cache with random keys and values, the same for every method.

    One that drops tokens, or of a model with layers that have other states, is prefilled with
    random tokens instead, in chunks, as a serving engine does.
    """
    model = loaded.model
    device = execution_device(model)
    if method.drops or _has_states(cache):
        generator = torch.Generator().manual_seed(seed)
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = torch.randint(0, vocabulary, (1, length), generator=generator, device="cpu")
        for part in bar(ids.to(device).split(_CHUNK, dim=1), desc=f"prefill {length}"):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return
    config = text_config(model)
    heads, kv_heads = heads_of(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator(device).manual_seed(seed)
    draw = partial(torch.randn, generator=generator, device=device, dtype=model.dtype)
    for layer in range(config.num_hidden_layers):
        k, v = (draw(1, kv_heads, length, head_dim) for _ in range(2))
        cache.update(k, v, layer)


def _interleaved(
    model: Any,
    methods: Sequence[Method],
    enter: Callable[[Method], AbstractContextManager[object]],
    run: Callable[[], None],
    repeats: int,
) -> dict[str, list[float]]:
    """Seconds of `run` by method, of interleaved rounds; entering a method is not timed."""
    contexts = {each.name: partial(enter, each) for each in methods}
    return time_calls(
        dict.fromkeys(contexts, run),
        contexts=contexts,
        repeats=repeats,
        device=str(execution_device(model)),
    )


def _rounds(seconds: Mapping[str, Sequence[float]], name: str) -> dict[str, Any]:
    """A method's rounds, and those of both dense attentions."""
    rounds = {"seconds": name, "model": MODEL, "kernel": KERNEL}
    return {field: tuple(seconds[each]) for field, each in rounds.items()}
