"""One call of a layer whose cache is under policies, and dense attention over what those keep.

Shapes: B batch, H query heads, G KV heads, Q new tokens, K keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    where the keys are fewer than it wants. That of a whole layer also takes `heads`, the KV heads that are meant.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    backend: str
    prefill: Callable[..., Tensor]

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def slots(self, begin: int, end: int, rows: Tensor | None = None) -> Step:
        """Some of its tokens, of these sequences or of all."""
        if rows is None and end - begin == self.length:
            return self
        some = (x if rows is None else x.index_select(0, rows) for x in (self.q, self.k, self.v))
        q, k, v = (x[:, :, begin:end] for x in some)
        return replace(self, q=q, k=k, v=v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> tuple[Tensor, Tensor]:
        """See attend_all."""
        return attend_all(q, k, v, window=window, scale=self.scale, softcap=self.softcap, backend=self.backend)


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
