"""One call of an attention layer with a cache policy: its new tokens, and what they see.

Shapes: B batch, H query heads, G KV heads, Q new tokens, K keys, s first tokens, D head dim, E
value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.decode import decode_attention
from kernels.dense import dense_attention
from kernels.merge import merge_attention


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """New tokens of one call, for some KV heads of sequences without padding.

    q (B, H, Q, D), k (B, G, Q, D), v (B, G, Q, E): rotated by the model.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    backend: str

    @property
    def length(self) -> int:
        """New tokens, Q."""
        return self.q.shape[2]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of every kernel."""
        return {"scale": self.scale, "softcap": self.softcap, "backend": self.backend}

    def slots(self, begin: int, end: int, rows: Tensor | None = None) -> Step:
        """Tokens begin to end of these sequences, or of all."""
        if rows is None and end - begin == self.length:
            return self
        states = [self.q, self.k, self.v]
        if rows is not None:
            states = [x.index_select(0, rows) for x in states]
        return self.with_states(*(x[:, :, begin:end] for x in states))

    def with_states(self, q: Tensor, k: Tensor, v: Tensor) -> Step:
        """Step with other queries, keys and values."""
        return Step(q=q, k=k, v=v, scale=self.scale, softcap=self.softcap, backend=self.backend)


class Sinks(NamedTuple):
    """First tokens of a text that queries see in addition to a window (StreamingLLM, section 3.2).

    q (B, H, Q, D), k (B, G, s, D), v (B, G, s, E): rotated so that their distances are those at
    which the queries see the tokens.

    Attributes:
        first: position of the first query in the text.
        window: tokens that a query sees in the window. A first token may be one of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    first: int
    window: int

    def merge(self, out: Tensor, lse: Tensor, *, scale: float, softcap: float | None) -> Tensor:
        """Merge attention over the window, (B, H, Q, E) and fp32 (B, H, Q), with that over these.

        A learned logit is counted in the window's already.
        """
        device = self.q.device
        positions = torch.arange(self.first, self.first + self.q.shape[2], device=device)
        numbers = torch.arange(self.k.shape[2], device=device)
        seen = numbers <= positions[:, None] - self.window
        return merge_attention(
            out, lse, self.q, self.k, self.v, seen=seen, scale=scale, softcap=softcap
        )


class View(NamedTuple):
    """Keys (B, G, K, D) and values (B, G, K, E) that the queries of a step see, causally.

    Attributes:
        ends: (B,) int32, the keys of each sequence where they are not equally many; Q is then 1.
        window: how many of the keys a query sees, itself included; None for all.
        sinks: first tokens that queries see in addition to the window.
        whole: True if the keys are a whole text and the queries its end: patterns may serve.
        scored: True if the policy needs the sums of the keys' probabilities.
    """

    keys: Tensor
    values: Tensor
    ends: Tensor | None = None
    window: int | None = None
    sinks: Sinks | None = None
    whole: bool = False
    scored: bool = False

    def attend(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Attention (B, H, Q, E) of a step's queries, and the sums (B, G, K) if `scored`."""
        options = step.options
        if self.scored:
            out, _, scores = decode_attention(
                step.q, self.keys, self.values, scores="sum", ends=self.ends, **options
            )
            return out, scores
        if self.ends is not None:
            return decode_attention(
                step.q, self.keys, self.values, ends=self.ends, **options
            ).out, None
        out, lse = dense_attention(step.q, self.keys, self.values, window=self.window, **options)
        if self.sinks is not None:
            out = self.sinks.merge(out, lse, scale=step.scale, softcap=step.softcap)
        return out, None
