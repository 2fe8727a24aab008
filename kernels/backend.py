"""Signatures of the ops that a backend implements, declared once; a test compares modules.

A backend is a module of kernels.attention, kernels.decode or kernels.gradient. Its `supports` gives
the reason why it cannot serve a call, None where it can. Tensors, meaning and errors of the
arguments are those of the public op; it has checked them, and filled in the scale.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.index import SparseIndex


class AttentionBackend(Protocol):
    """Module that computes kernels.attention.sparse_attention."""

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """The reason why the call cannot be served."""

    def sparse_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: SparseIndex,
        *,
        scale: float,
        softcap: float | None,
        block_table: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        skipped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output (B, H, Q, E) and log-sum-exp (B, H, Q)."""


class DecodeBackend(Protocol):
    """Module that computes kernels.decode.decode_attention."""

    def supports(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """The reason why the call cannot be served."""

    def decode_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        tokens: Tensor | None,
        starts: Tensor | None,
        ends: Tensor | None,
        window: int | None,
        scale: float,
        softcap: float | None,
        scores: str,
        block_table: Tensor | None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Output, log-sum-exp, and scores (B, G, C or K) where they are wanted."""

    def with_sums(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sum-exp and summed scores of any number of queries."""


class GradientBackend(Protocol):
    """Module that computes kernels.gradient.attention_gradients."""

    def attention_gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
        skip_below: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by q, k and v."""
