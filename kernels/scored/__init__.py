"""What caches that keep tokens by scores need: attention of any length that adds them up, and dropping the lowest.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, R rows of a cache, D head dim, E value dim.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

import kernels.dispatch as dispatch
from kernels.decode import MAX_QUERIES, Decoded, decode_attention
from kernels.decode.checks import check
from kernels.scored import cpu

__all__ = ["drop_lowest", "ranks", "scored_attention"]


def scored_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Decoded:
    """Causal attention of queries, the last Q of K, and the sum of each key's probabilities in all of them.

    That is decode_attention(scores="sum") of any number of queries: H2O's scores of a prompt (H2O, section 4). On the
    CPU rows of attention exist for 64 queries of a head at a time, one such tile a thread; on a GPU for none: a second
    pass makes probabilities again out of the log-sum-exp.

    Args:
        q: (B, H, Q, D) queries.
        k: (B, G, K, D) keys; query head i reads KV head i // (H // G).
        v: (B, G, K, E) values.
        scale: factor on the logits; D ** -0.5 if None.
        softcap: logits become softcap * tanh(logits / softcap).
        backend: see kernels.decode.decode_attention.

    Returns:
        out (B, H, Q, E) in q's dtype, lse (B, H, Q) fp32, scores (B, G, K) fp32.

    Raises:
        ValueError: as decode_attention does; more queries than keys.
    """
    q_len, k_len = q.shape[2], k.shape[2]
    if q_len > k_len:
        raise ValueError(f"queries are the last of the keys: got {q_len} queries and {k_len} keys")
    if q_len <= MAX_QUERIES:
        return decode_attention(q, k, v, scale=scale, softcap=softcap, scores="sum", backend=backend)
    # All that is asked of a call holds for its first query as well.
    check(q[:, :, :1], k, v, None, None, None, None, scale, softcap, "sum", None, None)
    how = q.shape[3] ** -0.5 if scale is None else float(scale)

    def call(module: ModuleType) -> Decoded:
        return Decoded(*module.scored_attention(q, k, v, scale=how, softcap=softcap))

    return dispatch.serve(backend, call, q, k, v, op="scored")


def drop_lowest(
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    positions: Tensor,
    *,
    rows: int,
    latest: int,
    queries: int | None = None,
    backend: str = "auto",
) -> None:
    """Drop one of the first `rows` tokens of each KV head: the lowest of those before the latest.

    The last of them takes its row; nothing else moves (H2O, Algorithm 1, where a token is evicted).

    Args:
        keys: (B, G, R, D), contiguous, as are all.
        values: (B, G, R, E).
        scores: (B, G, R) fp32.
        positions: (B, G, R) int32, in the text.
        rows: how many rows hold tokens; rows - 1 do afterwards.
        latest: tokens from this position on are not dropped; there must be others.
        queries: tokens are ranked by their score over (queries - position), how many queries saw them; by the score if
            None.
        backend: "auto" and "cpu" take native code for tensors on the CPU, others torch.

    Raises:
        ValueError: tensors that do not go together or are not contiguous; fewer than two rows, or more than there are.
    """
    _check(keys, values, scores, positions, rows)
    if backend in ("auto", "cpu") and cpu.serves(keys):
        cpu.drop_lowest(keys, values, scores, positions, rows=rows, latest=latest, queries=queries)
        return
    ranked = ranks(scores[:, :, :rows], positions[:, :, :rows], latest=latest, queries=queries)
    victims = ranked.argmin(dim=2, keepdim=True)
    for tensor in (keys, values, scores, positions):
        last = tensor[:, :, rows - 1 : rows]
        tensor.scatter_(2, victims if tensor.dim() == 3 else victims[..., None].expand_as(last), last.clone())


def ranks(scores: Tensor, positions: Tensor, *, latest: int, queries: int | None = None) -> Tensor:
    """(B, G, R): what drop_lowest goes by, infinite for the latest."""
    if queries is not None:
        scores = scores / (queries - positions)
    return scores.masked_fill(positions >= latest, torch.inf)


def _check(keys: Tensor, values: Tensor, scores: Tensor, positions: Tensor, rows: int) -> None:
    if scores.dtype != torch.float32 or positions.dtype != torch.int32:
        raise ValueError(f"scores must be float32 and positions int32, got {scores.dtype} and {positions.dtype}")
    tensors = (keys, values, scores, positions)
    if not keys.dim() == values.dim() == 4 or any(tensor.shape[:3] != scores.shape for tensor in tensors):
        raise ValueError(f"shapes do not go together: {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("keys, values, scores and positions must be contiguous: they are written in place")
    if not 1 < rows <= scores.shape[2]:
        raise ValueError(f"rows must be 2 to {scores.shape[2]}, got {rows}")
