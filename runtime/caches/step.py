"""One call of a layer whose cache is under policies, and dense attention over what those keep.

Shapes: B batch, H query heads, G KV heads, Q new tokens, K keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.breaker import CannotBuildError
from kernels.decode import MAX_QUERIES
from kernels.dense import dense_attention
from runtime.dense import right

# Queries of one turn of plain torch: few, for all their weights are written down.
_ROWS = 128


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """The new tokens of a call for some KV heads of sequences that all have Q new tokens, none of them padding.

    q (B, H, Q, D), k (B, G, Q, D), v (B, G, Q, E): rotated as the model does it. `prefill` is attention of the layer,
    (B, H, Q, E), for queries that are the last of keys none of which is missing: by the artifact's patterns, or dense
    where the keys are fewer than it wants.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    backend: str
    prefill: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def whole(self) -> Tensor:
        """Attention where these tokens are all there are, (B, H, Q, E)."""
        return self.prefill(self.q, self.k, self.v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> tuple[Tensor, Tensor]:
        """See attend_all."""
        return attend_all(q, k, v, window=window, scale=self.scale, softcap=self.softcap, backend=self.backend)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a call of a layer says beside queries, keys and values, and what attends to a whole prompt.

    prefill: as Step's, with the KV heads that are meant, None for all. None: nobody wants the attention, for tokens are
    taken in a second time; so a recording is plain data, and a copy of it works wherever it is.
    """

    scale: float
    softcap: float | None
    backend: str
    prefill: Callable[[Tensor, Tensor, Tensor, tuple[int, ...] | None], Tensor] | None = None

    def step(self, q: Tensor, k: Tensor, v: Tensor, heads: tuple[int, ...] | None) -> Step:
        """New tokens of these KV heads, None for all of the layer."""
        prefill = self.prefill
        attend = _nothing if prefill is None else lambda q, k, v: prefill(q, k, v, heads)
        return Step(q=q, k=k, v=v, scale=self.scale, softcap=self.softcap, backend=self.backend, prefill=attend)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros(*q.shape[:3], v.shape[3])


def attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None,
    backend: str,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of queries (B, H, Q, D), the last of keys (B, G, K, D): out (B, H, Q, E) and lse (B, H, Q).

    Many queries, with the backend "auto", go to plain torch where no fast kernel serves or is known to be right: there
    is no attention of the model's that could read what is kept, and the reference is too slow for them.
    """
    how: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    if backend == "auto" and q.shape[2] > MAX_QUERIES:
        if dispatch.why_slow(q, k, v) is not None or not right(q, k, v):
            return _by_torch(q, k, v, **how)
        try:
            return dense_attention(q, k, v, return_lse=True, backend=dispatch.fastest(q, k, v), **how)
        except ValueError as error:
            if not isinstance(error.__cause__, CannotBuildError):
                raise
        return _by_torch(q, k, v, **how)
    return dense_attention(q, k, v, return_lse=True, backend=backend, **how)


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """attend_all in matrix products of float32, some queries at a time."""
    batch, heads, q_len, _ = q.shape
    kv_heads, before = k.shape[1], k.shape[2] - q_len
    out = q.new_empty(batch, heads, q_len, v.shape[3])
    lse = torch.empty(batch, heads, q_len, device=q.device)
    for begin in range(0, q_len, _ROWS):
        end = min(begin + _ROWS, q_len)
        first, last = 0 if window is None else max(before + begin - window + 1, 0), before + end
        keys, values = (x[:, :, None, first:last].float() for x in (k, v))
        logits = q[:, :, begin:end].float().unflatten(1, (kv_heads, -1)) @ keys.transpose(3, 4) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        at = torch.arange(before + begin, last, device=q.device)[:, None]
        distance = at - torch.arange(first, last, device=q.device)
        seen = (distance >= 0) & (distance < (last if window is None else window))
        logits = logits.masked_fill(~seen, float("-inf"))
        whole = logits.logsumexp(-1)
        out[:, :, begin:end] = ((logits - whole[..., None]).exp() @ values).flatten(1, 2)
        lse[:, :, begin:end] = whole.flatten(1, 2)
    return out, lse
