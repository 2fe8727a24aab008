"""The time that Python spends in the attention function, in a decode step and a sparse prefill, without the arithmetic.

A layer's real call is recorded and repeated with kernels that return at once what is already there: torch's attention
and Headwise's native ones, in a prefill the build of the index, too. What is left is Python, transformers' own function
and the checks of our kernels included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kernels.patterns import LayerPlan
from runtime import Headwise
from runtime.attention.function import ATTENTION_NAME, headwise_attention, register
from runtime.attention.state import layer_of

_CALLS = 200
_ROUNDS = 25


@dataclass(frozen=True, kw_only=True)
class PythonTime:
    """Median microseconds of one layer's call without arithmetic; `own`: beyond what sdpa takes for a decode step."""

    what: str
    microseconds: float
    own: float


@torch.no_grad()
def python_time(model: Any, headwise: Headwise, sparse: Headwise, tokens: int) -> list[PythonTime]:
    """A decode step's call over `tokens` keys: by sdpa as without an artifact, by sdpa with one, and by our kernel.

    And a prefill's of as many tokens by the patterns of `sparse`, which it has to be long enough for.
    """
    runs: dict[str, Callable[[], object]] = {}
    with headwise.apply(model, check_weights=False):
        args, kwargs = _recorded(model, tokens, steps=1)
        query = args[1]
        out = torch.empty_like(query)
        done = out.transpose(1, 2).contiguous().transpose(1, 2), torch.empty(query.shape[:3]), None
        runs["sdpa, no artifact"] = lambda: sdpa_attention_forward(*args, **kwargs)
        runs["by kernel"] = lambda: headwise_attention(*args, **kwargs)
        seconds = _timed({name: run for name, run in runs.items()}, out, done)
    with headwise.apply(model, check_weights=False, dense_kernels=False):
        seconds |= _timed({"sdpa": lambda: headwise_attention(*args, **kwargs)}, out, done)
    plain = seconds["sdpa, no artifact"]
    with sparse.apply(model, check_weights=False):
        args, kwargs = _recorded(model, tokens, steps=0)
        found = _timed({"sparse prefill": lambda: headwise_attention(*args, **kwargs)}, *_prefilled(*args))
    seconds |= found
    return [
        PythonTime(what=name, microseconds=1e6 * value, own=0.0 if value is plain else 1e6 * max(value - plain, 0.0))
        for name, value in seconds.items()
    ]


def _prefilled(module: Any, q: Any, k: Any, *_: Any) -> tuple[Any, ...]:
    """What the native kernel gives for a layer's prefill, and its index."""
    plan = layer_of(module).plan  # type: ignore[union-attr]
    assert plan is not None
    out = torch.empty_like(q)
    return out, (out, torch.empty(q.shape[:3])), plan.build(q, k)


def _recorded(model: Any, tokens: int, *, steps: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the last layer's call in a prefill, or the step of decode after it, of so many tokens in all."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def recording(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return headwise_attention(*args, **kwargs)

    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    cache = transformers.DynamicCache(config=model.config)
    AttentionInterface.register(ATTENTION_NAME, recording)
    try:
        model(ids[:, steps:], past_key_values=cache, use_cache=True, logits_to_keep=1)
        if steps:
            model(ids[:, :steps], past_key_values=cache, use_cache=True)
    finally:
        register()
    return calls[-1]


def _timed(runs: dict[str, Callable[[], object]], out: Any, done: Any, index: Any = None) -> dict[str, float]:
    """Median seconds of one call of each, measured in turn: the processor's, for nothing here waits for anything."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with _no_arithmetic(out, done, index):
        for _ in range(_ROUNDS):
            for name, run in runs.items():
                start = time.thread_time()
                for _ in range(_CALLS):
                    run()
                seconds[name].append((time.thread_time() - start) / _CALLS)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextmanager
def _no_arithmetic(out: Any, done: Any, index: Any) -> Iterator[None]:
    with (
        mock.patch("torch.nn.functional.scaled_dot_product_attention", lambda *args, **kwargs: out),
        mock.patch("kernels.decode.cpu.decode_attention", lambda *args, **kwargs: done),
        mock.patch("kernels.attention.cpu.sparse_attention", lambda *args, **kwargs: done),
        mock.patch.object(LayerPlan, "build", lambda *args, **kwargs: index),
    ):
        yield
