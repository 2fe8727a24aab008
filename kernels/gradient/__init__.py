"""Gradients of dense attention, recomputed tile by tile from the log-sum-exp.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from torch import Tensor

from kernels import registry
from kernels.call import GradientCall
from kernels.logits import PLAIN, Logits

__all__ = ["GradientCall", "attention_gradients"]


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    logits: Logits = PLAIN,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a loss by q, k and v of dense causal attention.

    No Q x K matrix is made (FlashAttention-2, Algorithm 2; Dao, 2023). The same bits in every run.

    Args:
        q: (B, H, Q, D) queries, the last Q of the K positions.
        k: (B, G, K, D) keys; query head i reads KV head i // (H // G).
        v: (B, G, K, E) values.
        out: (B, H, Q, E) attention's output.
        lse: (B, H, Q) natural log-sum-exp of each query's logits, as kernels.attention.attend
            returns it. With learned sinks it includes theirs, and so does `out`.
        grad_out: (B, H, Q, E) gradient of the loss by `out`.
        logits: scale, soft-cap and window; sinks are in `out` and `lse` already.
        backend: "flash" is torch's FlashAttention on a GPU or a CPU (no soft-cap, no window, as
            many queries as keys), "reference" torch on any device; "auto" takes the first that
            serves the call.

    Returns:
        dq, dk, dv with the shapes and dtypes of q, k and v.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together; a number out of its range; a
            named backend that cannot serve the call.
    """
    call = GradientCall(
        q,
        k,
        v,
        out,
        lse,
        grad_out,
        logits=logits,
    )
    gradients: tuple[Tensor, Tensor, Tensor] = registry.run("gradient", call, backend)
    return gradients
