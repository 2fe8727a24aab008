"""Sparse attention: one op over a SparseIndex, several backends.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from torch import Tensor

from kernels import registry
from kernels.call import AttentionCall
from kernels.index import SparseIndex
from kernels.logits import PLAIN, Logits

__all__ = ["AttentionCall", "Logits", "attend", "sparse_attention"]


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    *,
    logits: Logits = PLAIN,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    skipped: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention over the keys that the index names (MInference 1.0, Algorithm 5).

    Args:
        q: (B, H, Q, D) queries, the last Q of the K positions; any strides with D contiguous.
        k: (B, G, K, D) keys; query head i reads KV head i // (H // G). With a block table (pages,
            page size, G, D). Keys and values are of q's dtype, or both float8_e4m3fn or
            float8_e5m2.
        v: (B, G, K, E) values. With a block table (pages, page size, G, E).
        index: SparseIndex for H heads and either B, Q and K or, if it is ragged, its own sequences.
        logits: scale, soft-cap and learned sinks. A window is the index's.
        block_table: (sequences, at least ceil(K / page size)) int32: the page that holds keys i *
            page size and on. A serving engine's cache is read where it lies.
        out: (B, H, Q, E) of q's dtype to write to, E contiguous; allocated if None.
        skipped: (B or S, H) int32 contiguous, to which is added how many tiles each head skipped
            (SparseIndex.skip).
        backend: "auto" takes the fastest that serves the call, never the slow reference; a name
            takes that one or raises.

    Returns:
        (B, H, Q, E) in q's dtype, a transposed view of a contiguous (B, Q, H, E). Rows of q that
        belong to no sequence of a ragged index get zeros.

    Non-finite inputs: NaN or infinity spreads inside its own head, as in torch's sdpa: a value
    reaches all queries of its KV head that compute its tile. Memory outside of the sequences, and
    behind the window of a sequence's first query, never reaches an output, whatever it holds.

    Raises:
        ValueError: shapes, dtypes, layouts or devices that do not go together; an index whose
            entries are not as SparseIndex.validate wants them; a scale or soft-cap that is not
            positive and finite; a named backend that cannot serve the call; with
            "auto" no kernel can (kernels.registry.NoKernelError).
    """
    call = AttentionCall(
        q,
        k,
        v,
        index,
        logits=logits,
        block_table=block_table,
        out=out,
        skipped=skipped,
    )
    return attend(call, backend)[0]


def attend(call: AttentionCall, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The output of a call as sparse_attention returns it, and its log-sum-exp.

    Returns:
        (B, H, Q, E), and (B, H, Q) fp32: the natural log-sum-exp of each query's computed logits,
        its sink's included; -inf for rows of q that belong to no sequence.

    Raises:
        ValueError: a named backend that cannot serve the call; with
            "auto" no kernel can (kernels.registry.NoKernelError).
    """
    attended: tuple[Tensor, Tensor] = registry.run("attention", call, backend)
    return attended
