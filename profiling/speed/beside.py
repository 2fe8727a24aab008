"""What a prefill takes beside attention, and how much of that its linear layers take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from profiling.speed.latency import prefill
from runtime import apply_dense
from runtime.attention.function import ATTENTION_NAME, register
from runtime.measured import wait

_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A prefill of so many tokens whose attention is left out: median seconds, and those of all linear layers."""

    tokens: int
    seconds: float
    linear_s: float


@torch.no_grad()
def beside_attention(model: Any, lengths: Sequence[int]) -> list[Beside]:
    """Prefills of each length in turn, three times after one that is not timed, with zeros for attention."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = {n: torch.arange(n, device=model.device)[None] % vocabulary for n in lengths}
    taken: dict[int, list[tuple[float, float]]] = {n: [] for n in lengths}
    with apply_dense(model), _without_attention(), _timed_linear(model) as linear:
        for turn in range(_ROUNDS + 1):
            for n in lengths:
                linear.clear()
                start = time.perf_counter()
                prefill(model, ids[n])
                wait(model.device)
                if turn:
                    taken[n].append((time.perf_counter() - start, sum(linear)))
    middle = {n: [statistics.median(each) for each in zip(*taken[n], strict=True)] for n in lengths}
    return [Beside(tokens=n, seconds=seconds, linear_s=linear_s) for n, (seconds, linear_s) in middle.items()]


def _zeros(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None


@contextmanager
def _without_attention() -> Iterator[None]:
    AttentionInterface.register(ATTENTION_NAME, _zeros)
    try:
        yield
    finally:
        register()


@contextmanager
def _timed_linear(model: nn.Module) -> Iterator[list[float]]:
    """The seconds of each call of a linear layer, while it lasts."""
    calls: list[float] = []
    start = 0.0

    def before(module: nn.Module, *_: Any) -> None:
        nonlocal start
        wait(next(module.parameters()).device)
        start = time.perf_counter()

    def after(module: nn.Module, *_: Any) -> None:
        wait(next(module.parameters()).device)
        calls.append(time.perf_counter() - start)

    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [hook for m in found for hook in (m.register_forward_pre_hook(before), m.register_forward_hook(after))]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
