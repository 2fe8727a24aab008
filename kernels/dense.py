"""Dense causal attention by our own kernels, from one token to whole prompts, without an index.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from torch import Tensor

from kernels.attention import attend
from kernels.call import MAX_QUERIES, AttentionCall
from kernels.checks import check_query_length, check_tensors
from kernels.decode import decode_attention
from kernels.logits import PLAIN, Logits
from kernels.patterns.dense import dense_index
from kernels.ragged import Ragged

__all__ = ["dense_attention"]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    logits: Logits = PLAIN,
    ragged: Ragged | None = None,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal attention over every key, or a sliding window; queries are the last of their keys.

    A few queries go to decode, which reads keys and values where they lie; more of them to
    kernels.attention with an index that is made once for each shape.

    Args:
        q: as for sparse_attention.
        k: as for sparse_attention.
        v: as for sparse_attention.
        logits: scale, soft-cap, learned sinks and window.
        ragged: where the sequences lie, if they are not all as long as the tensors; needed with a
            block table.
        block_table: as for sparse_attention.
        out: as for sparse_attention.
        backend: as for sparse_attention.

    Returns:
        Output and log-sum-exp, as kernels.attention.attend.

    Raises:
        ValueError: as sparse_attention; a block table without the lengths of its sequences.
    """
    check_tensors(q=q, k=k, v=v)
    if block_table is not None and ragged is None:
        raise ValueError("a block table needs the lengths of its sequences: pass a Ragged")
    if out is None and _few(q, k, ragged, paged=block_table is not None):
        starts = ends = None
        if ragged is not None:
            table = ragged.table(q.device)
            starts = table[:, 3]
            ends = table[:, 3] + table[:, 4]
        few = decode_attention(
            *(q, k, v),
            logits=logits,
            starts=starts,
            ends=ends,
            block_table=block_table,
            backend=backend,
        )
        return few.out, few.lse
    batch = q.shape[0]
    q_len = q.shape[2]
    k_len = k.shape[2]
    if ragged is not None:
        batch = len(ragged)
        q_len = max(ragged.q_lens)
        k_len = max(ragged.k_lens)
    else:
        check_query_length(q_len, k_len)
    index = dense_index(
        batch, q.shape[1], q_len, k_len, q.device, window=logits.window, ragged=ragged
    )
    call = AttentionCall(q, k, v, index, logits=logits, block_table=block_table, out=out)
    return attend(call, backend)


def _few(q: Tensor, k: Tensor, ragged: Ragged | None, *, paged: bool) -> bool:
    """True if decode serves: all sequences have equally few queries, each a batch element."""
    batch = q.shape[0]
    q_len = q.shape[2]
    if not 0 < q_len <= MAX_QUERIES or not batch:
        return False
    if ragged is None:
        return q_len <= k.shape[2]
    alike = ragged.rows == tuple(range(batch)) and ragged.q_lens == (q_len,) * batch
    return alike and ragged.fault(q.shape, None if paged else k.shape) is None
