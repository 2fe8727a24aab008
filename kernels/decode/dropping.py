"""Drops the tokens that a cache's scores rank lowest (H2O, Algorithm 1), in place.

Shapes: B batch, G KV heads, R rows of a cache, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.native import build


def serves(x: Tensor) -> bool:
    """True if native code (sums.cpp) drops tokens of x's cache; else torch does."""
    return x.device.type == "cpu" and build.load() is None


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
        queries: tokens are ranked by their score over (queries - position), how many queries saw
            them; by the score if None.
        backend: "auto" and "cpu" take native code for tensors on the CPU, others torch.

    Raises:
        ValueError: tensors that do not go together or are not contiguous; fewer than two rows, or
            more than there are.
    """
    _check(keys, values, scores, positions, rows)
    if backend in ("auto", "cpu") and serves(keys):
        torch.ops.headwise.drop_lowest(keys, values, scores, positions, rows, latest, queries or 0)
        return
    ranked = ranks(scores[:, :, :rows], positions[:, :, :rows], latest=latest, queries=queries)
    victims = ranked.argmin(dim=2, keepdim=True)
    for tensor in (keys, values, scores, positions):
        last = tensor[:, :, rows - 1 : rows]
        places = victims
        if tensor.dim() == 4:
            places = victims[..., None].expand_as(last)
        tensor.scatter_(2, places, last.clone())


def ranks(scores: Tensor, positions: Tensor, *, latest: int, queries: int | None = None) -> Tensor:
    """(B, G, R): what drop_lowest goes by, infinite for the latest."""
    if queries is not None:
        scores = scores / (queries - positions)
    return scores.masked_fill(positions >= latest, torch.inf)


def _check(keys: Tensor, values: Tensor, scores: Tensor, positions: Tensor, rows: int) -> None:
    if scores.dtype != torch.float32 or positions.dtype != torch.int32:
        raise ValueError(
            f"scores must be float32 and positions int32, got {scores.dtype} and {positions.dtype}"
        )
    tensors = (keys, values, scores, positions)
    if not keys.dim() == values.dim() == 4 or any(
        tensor.shape[:3] != scores.shape for tensor in tensors
    ):
        raise ValueError(
            f"shapes do not go together: "
            f"{', '.join(str(tuple(tensor.shape)) for tensor in tensors)}"
        )
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(
            "keys, values, scores and positions must be contiguous: they are written in place"
        )
    if not 1 < rows <= scores.shape[2]:
        raise ValueError(f"rows must be 2 to {scores.shape[2]}, got {rows}")
