"""Cache policies by their papers' definitions, in plain torch: one KV head, one token at a time.

Shapes: n tokens, m query heads of a KV head, D head dim, E value dim.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import artifacts
from tests.runtime.batches import attending, chunks_of


@dataclass(frozen=True)
class Head:
    """One KV head of one sequence: q (m, n, D), k (n, D), v (n, E), rotated by text positions.

    turned(x, by): x (..., n, D) rotated on by `by` (n,) positions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    turned: Callable[[Tensor, Tensor], Tensor]

    def attend(self, token: int, retained: list[int]) -> tuple[Tensor, Tensor]:
        """Output (m, E) and probabilities (m, len(kept)) of a token that sees these tokens."""
        weights = (self.q[:, token] @ self.k[retained].T * self.scale).softmax(-1)
        return weights @ self.v[retained], weights


# Output (m, n, E), and the tokens kept in the end.
Result = tuple[Tensor, list[int]]


def budget(size: int | float, seen: int) -> int:
    """Tokens that a count or a fraction of the tokens seen allows, in exact arithmetic."""
    return math.ceil(Fraction(str(size)) * seen) if isinstance(size, float) else size


def full(record: artifacts.Full, head: Head, chunks: list[tuple[int, int]]) -> Result:
    """Every token is kept."""
    n = chunks[-1][1]
    outs = [head.attend(token, list(range(token + 1)))[0] for token in range(n)]
    return torch.stack(outs, dim=1), list(range(n))


def streaming(record: artifacts.Streaming, head: Head, chunks: list[tuple[int, int]]) -> Result:
    """StreamingLLM, section 3.2: first and last tokens, with positions in the cache or the text."""
    outs = []
    retained: list[int] = []
    for token in range(chunks[-1][1]):
        last = range(max(0, token - record.window + 1), token + 1)
        retained = sorted({*range(min(record.sinks, token + 1)), *last})
        positions = torch.tensor(retained)
        if record.positions == "cache":
            positions = torch.arange(len(retained))
        k = head.turned(head.k[retained], positions - torch.tensor(retained))
        q = head.turned(head.q[:, [token]], positions[-1:] - token)
        weights = (q @ k.T * head.scale).softmax(-1)
        outs.append((weights @ head.v[retained])[:, 0])
    return torch.stack(outs, dim=1), retained


def h2o(record: artifacts.H2O, head: Head, chunks: list[tuple[int, int]]) -> Result:
    """H2O, section 4: after each call the tokens with the lowest sums of probabilities go.

    "greedy" is the same with calls of one token each (Algorithm 1).
    """
    n = chunks[-1][1]
    if record.eviction == "greedy":
        chunks = [(token, token + 1) for token in range(n)]
    outs = []
    retained: list[int] = []
    score = torch.zeros(n)
    for begin, end in chunks:
        for token in range(begin, end):
            retained.append(token)
            out, weights = head.attend(token, retained)
            outs.append(out)
            score[retained] += weights.sum(0)
        recent = budget(record.recent, end)
        while len(retained) > budget(record.heavy, end) + recent:
            old = [token for token in retained if token < end - recent]
            age = {token: end - token if record.normalised else 1 for token in old}
            retained.remove(min(old, key=lambda token: score[token].item() / age[token]))
    return torch.stack(outs, dim=1), retained


def snapkv(record: artifacts.SnapKV, head: Head, chunks: list[tuple[int, int]]) -> Result:
    """SnapKV, section 4: a prompt keeps its window, and the best by the window's pooled votes."""
    outs = []
    retained: list[int] = []
    for begin, end in chunks:
        votes = torch.zeros(end)
        for token in range(begin, end):
            retained.append(token)
            out, weights = head.attend(token, retained)
            outs.append(out)
            if token >= end - record.window:
                votes[retained] += weights.sum(0)
        if end - begin >= max(2, record.window):
            retained = _selected(record, votes, retained, budget(record.budget, end))
    return torch.stack(outs, dim=1), retained


def _selected(
    record: artifacts.SnapKV, votes: Tensor, retained: list[int], limit: int
) -> list[int]:
    earlier = retained[: -record.window]
    half = record.pool // 2
    pooled = {}
    for i, token in enumerate(earlier):
        neighbours = earlier[max(0, i - half) : i + half + 1]
        pooled[token] = sum(votes[other].item() for other in neighbours)
    ranked = sorted(earlier, key=lambda token: -pooled[token])
    return sorted(ranked[: max(0, limit - record.window)]) + retained[-record.window :]


DEFINITIONS: dict[str, Callable[..., Result]] = {
    "full": full,
    "streaming": streaming,
    "h2o": h2o,
    "snapkv": snapkv,
}


@contextmanager
def defined(model: Any, record: Any, sizes: Sequence[int]) -> Iterator[list[Any]]:
    """All attention of the model by a policy's definition, for whole sequences without a cache.

    Yields a list that gets, layer by layer, the values kept in the end: [batch][KV head] (n, E).
    """
    retained: list[Any] = []
    rotary = model.model.rotary_emb

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        apply = inspect.unwrap(type(module).forward).__globals__["apply_rotary_pos_emb"]

        def turned(x: Tensor, by: Tensor) -> Tensor:
            cos, sin = rotary(x, by[None])
            flat = x.reshape(1, -1, *x.shape[-2:])
            return apply(flat, flat, cos, sin)[0].reshape(x.shape)

        grouped = q.float().unflatten(1, (k.shape[1], -1))
        out = torch.empty(*grouped.shape[:4], v.shape[3])
        retained.append([])
        for b in range(q.shape[0]):
            retained[-1].append([])
            for g in range(k.shape[1]):
                head = Head(grouped[b, g], k[b, g].float(), v[b, g].float(), scaling, turned)
                chunks = chunks_of(q.shape[2], sizes)
                out[b, g], tokens = DEFINITIONS[record.kind](record, head, chunks)
                retained[-1][-1].append(v[b, g, tokens])
        return out.flatten(1, 2).transpose(1, 2).to(q.dtype).contiguous(), None

    with attending(model, attention):
        yield retained
