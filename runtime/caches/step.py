"""One call of a layer whose cache is under policies, and dense attention over what those keep.

Shapes: B batch, H query heads, G KV heads, Q new tokens, K keys, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kernels.dense import dense_attention


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """The new tokens of a call for some KV heads of sequences that all have Q new tokens, none of
    them padding.

    q (B, H, Q, D), k (B, G, Q, D), v (B, G, Q, E): rotated as the model does it. `prefill` is
    attention of the layer, (B, H, Q, E), for queries that are the last of keys none of which is
    missing: by the artifact's patterns, or dense where the keys are fewer than it wants. That of a
    whole layer also takes `heads`, the KV heads that are meant."""

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

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of queries (B, H, Q, D), the last of keys (B, G, K, D): out (B, H, Q,
        E), lse (B, H, Q)."""
        how: dict[str, Any] = {
            "scale": self.scale,
            "softcap": self.softcap,
            "backend": self.backend,
        }
        return dense_attention(q, k, v, window=window, **how)
