"""OmniKV's decode in plain torch over full attention weights, and shared helpers of its tests.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from artifacts import OmniKV
from runtime.omnikv.copy_engine import CopyEngine
from tests.runtime.batches import attending, fed

CLOSE = {"atol": 3e-4, "rtol": 1e-3}
# Largest number of queries in a decode call.
LONGEST_DECODE = 16
LAYERS = {"num_hidden_layers": 6}
DECODE = OmniKV(filter_layers=(2, 4), dense_layers=(0, 1), selector="last", window=4, budget=24)


@dataclass
class Oracle:
    """Attention from full weights, with each filter layer's selections and recent scores."""

    decode: OmniKV
    # Keyed by filter layer.
    selected: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    past: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, module, query, key, value, mask, dropout=0.0, scaling=None, **kwargs) -> Any:
        q_len, k_len, layer = query.shape[2], key.shape[2], module.layer_idx
        groups = query.shape[1] // key.shape[1]
        keys, values = (repeat_kv(x.to(query.dtype), groups) for x in (key, value))
        logits = query @ keys.transpose(2, 3) * scaling
        seen = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)[None, None]
        window = getattr(module, "sliding_window", None)
        if mask is not None:
            seen = mask[..., :k_len]
        logits = logits.masked_fill(~seen, float("-inf"))
        budget = self.decode.budget
        if isinstance(budget, float):
            budget = ceil(budget * k_len)
        # The newest tokens are always selected.
        budget = max(budget, q_len)
        chooses = q_len <= LONGEST_DECODE and k_len > budget and window is None
        before = [f for f in self.decode.filter_layers if f < layer]
        sparse = (
            layer not in (*self.decode.filter_layers, *self.decode.dense_layers)
            and before
            and window is None
        )
        if chooses and sparse:
            logits = logits.masked_fill(~self.selected[before[-1]][:, None, None], float("-inf"))
        past, ratio = k_len - q_len, self.decode.prefill_ratio
        chunk = ratio is not None and q_len >= 64 and window is None and ceil(ratio * q_len) < past
        if chunk and sparse:
            visible = torch.nn.functional.pad(self.past[before[-1]], (0, q_len), value=True)
            logits = logits.masked_fill(~visible[:, None, None], float("-inf"))
        weights = logits.softmax(-1)
        # (B, K): real tokens of each sequence.
        real = seen[:, 0, -1].expand(query.shape[0], -1)
        if chunk and layer in self.decode.filter_layers:
            scores = weights.nan_to_num()[:, :, -self.decode.window :, :past].amax((1, 2))
            self.past[layer] = _highest(scores, real[:, :past], ceil(ratio * q_len))
        if layer in self.decode.filter_layers and window is None:
            self._remember(layer, weights.nan_to_num(), chooses)
            if chooses:
                scores = self._scores(layer, k_len)
                scores[:, -q_len:] = float("inf")
                self.selected[layer] = _highest(scores, real, budget)
        return (weights @ values).transpose(1, 2).contiguous(), weights

    def _remember(self, layer: int, weights: Tensor, chooses: bool) -> None:
        """Store a row of scores (B, K) for each of the latest queries; weights: (B, H, Q, K)."""
        rows, q_len = self.rows.setdefault(layer, []), weights.shape[2]
        if chooses:
            rows.append(weights.amax((1, 2)))
        elif q_len > 1:
            latest = range(min(self.decode.window - 1, q_len), 0, -1)
            rows += [weights[..., -back, :].amax(1) for back in latest]

    def _scores(self, layer: int, k_len: int) -> Tensor:
        """Return the selector's scores (B, K) of all tokens."""
        rows = self.rows[layer][-self.decode.window :]
        rows = [torch.nn.functional.pad(row, (0, k_len - row.shape[-1])) for row in rows]
        if self.decode.selector == "uniform":
            return sum(rows)
        if self.decode.selector == "exponential":
            return sum(row * 0.5**age for age, row in enumerate(reversed(rows)))
        return rows[-1].clone()


def _highest(scores: Tensor, real: Tensor, count: int) -> Tensor:
    """Return the mask (B, K) of the `count` real tokens with the highest scores, or of all real
    tokens if fewer."""
    best = scores.masked_fill(~real, float("-inf")).topk(count, dim=-1).indices
    return torch.zeros_like(real).scatter(1, best, True) & real


def oracle(model: Any, decode: OmniKV) -> AbstractContextManager[None]:
    return attending(model, Oracle(decode))


class LateCopyEngine(CopyEngine):
    """Copy engine that copies and fetches only when the caller waits.

    A read without the needed wait returns NaN.
    """

    fetched: list[int]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._sent: list[tuple[Tensor, Tensor]] = []
        self._late: dict[Future[Any], tuple[Any, ...]] = {}
        self.fetched = []

    def memory(self, nbytes: int) -> Tensor:
        return super().memory(nbytes).fill_(255)

    def write(self, target: Tensor, rows: Tensor) -> None:
        self._sent.append((target, rows))

    def synchronize(self) -> None:
        sent, self._sent = self._sent, []
        for target, rows in sent:
            target.copy_(rows)

    def wait_writes(self) -> None:
        self.synchronize()

    def submit(self, execute: Callable[..., Any], tokens: Tensor, *request: Any) -> Future[Any]:
        running: Future[Any] = Future()
        self._late[running] = (execute, tokens.clone(), *request)
        return running

    def wait(self, running: Future[Any]) -> Any:
        if (late := self._late.pop(running, None)) is not None:
            execute, *request = late
            running.set_result(execute(*request))
        return super().wait(running)

    def staging(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        self.fetched.append(rows)
        return super().staging(rows, width, dtype).fill_(float("nan"))


def steps(
    model: Any, prompt: Tensor, forced: Tensor, cache: Any = None, real: Tensor | None = None
) -> Tensor:
    """Return the logits (B, 1 + forced, vocabulary) of a prefill's last token and of forced
    tokens.

    Args:
        real: the prompt's attention mask.
    """
    tokens = torch.cat([prompt, forced], dim=1)
    if real is not None:
        real = torch.nn.functional.pad(real, (0, forced.shape[1]), value=1)
    begin = prompt.shape[1] - 1
    return fed(model, tokens, (prompt.shape[1], 1), cache, attention_mask=real)[:, begin:]
