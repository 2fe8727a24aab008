"""Drops the tokens that a cache's scores rank lowest (H2O, Algorithm 1), in place.

Shapes: B batch, G KV heads, R rows of a cache, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.copies import on_device
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
    rows: Sequence[int],
    latest: Sequence[int],
    queries: Sequence[int] | None = None,
    backend: str = "auto",
) -> None:
    """Drop one of the first `rows` tokens of each KV head: the lowest of those before the latest.

    The last of them takes its row; nothing else moves (H2O, Algorithm 1, where a token is evicted).
    Sequences may differ in length.

    Args:
        keys: (B, G, R, D), contiguous, as are all.
        values: (B, G, R, E).
        scores: (B, G, R) fp32.
        positions: (B, G, R) int32, in the text.
        rows: how many rows of each sequence hold tokens; rows - 1 do afterwards. 0 drops none of
            that sequence.
        latest: of each sequence; tokens from this position on are not dropped; there must be
            others.
        queries: of each sequence; tokens are ranked by their score over (queries - position), how
            many queries saw them; by the score if None.
        backend: "auto" and "cpu" take native code for tensors on the CPU, others torch.

    Raises:
        ValueError: tensors that do not go together or are not contiguous; numbers that are not one
            for each sequence; one row of a sequence, or more than there are.
    """
    _check(keys, values, scores, positions, rows, latest, queries)
    if backend in ("auto", "cpu") and serves(keys):
        torch.ops.headwise.drop_lowest(
            keys, values, scores, positions, list(rows), list(latest), list(queries or ())
        )
        return
    slots = torch.arange(max(rows), device=keys.device)
    ranked = ranks(
        scores[:, :, : len(slots)], positions[:, :, : len(slots)], latest=latest, queries=queries
    )
    ends = on_device(tuple(rows), keys.device)[:, None, None]
    victims = ranked.masked_fill(slots >= ends, torch.inf).argmin(dim=2, keepdim=True)
    lasts = (ends - 1).expand_as(victims)
    # The last row of a sequence that drops nothing stays where it is.
    lasts = torch.where(ends > 0, lasts, victims)
    for tensor in (keys, values, scores, positions):
        source = lasts
        target = victims
        if tensor.dim() == 4:
            source = lasts[..., None].expand(-1, -1, -1, tensor.shape[3])
            target = victims[..., None].expand_as(source)
        tensor.scatter_(2, target, tensor.gather(2, source))


def ranks(
    scores: Tensor,
    positions: Tensor,
    *,
    latest: Sequence[int],
    queries: Sequence[int] | None = None,
) -> Tensor:
    """(B, G, R): what drop_lowest goes by, infinite for the latest of each sequence."""
    if queries is not None:
        seen_by = on_device(tuple(queries), scores.device, torch.int32)[:, None, None] - positions
        scores = scores / seen_by
    first = on_device(tuple(latest), scores.device, torch.int32)[:, None, None]
    return scores.masked_fill(positions >= first, torch.inf)


def _check(
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    positions: Tensor,
    rows: Sequence[int],
    latest: Sequence[int],
    queries: Sequence[int] | None,
) -> None:
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
    batch, _, room = scores.shape
    for name, numbers in (("rows", rows), ("latest", latest), ("queries", queries)):
        if numbers is not None and len(numbers) != batch:
            raise ValueError(
                f"{name} must be {batch} numbers, one for each sequence, got {len(numbers)}"
            )
    for count in rows:
        if count == 1 or not 0 <= count <= room:
            raise ValueError(f"rows must be 0 or 2 to {room}, got {count}")
