"""Checks that calls share; every sentence of an error of theirs is written once.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# What caches of 8 bits hold; both are exact in 16.
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_tensor(name: str, x: object) -> None:
    """Raise ValueError unless x is a tensor with strides (not sparse, mkldnn ...)."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}")


def check_tensors(**tensors: Tensor) -> None:
    """Raise ValueError unless all are dense tensors (B, heads, length, dim)."""
    flat = True
    for name, x in tensors.items():
        check_tensor(name, x)
        flat = flat and x.dim() == 4
    if not flat:
        ranks = ", ".join(f"{name} {x.dim()}-D" for name, x in tensors.items())
        raise ValueError(f"{_names(tensors)} must be 4-D (B, heads, length, dim), got {ranks}")


def check_groups(num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError for query heads that do not read the same number of KV heads each."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} KV heads")


def check_query_length(q_len: int, k_len: int) -> None:
    """Raise ValueError for queries that cannot be the last of the keys."""
    if not 0 < q_len <= k_len:
        raise ValueError(f"query length must be between 1 and key length {k_len}, got {q_len}")


def check_last(q_len: int, k_len: int) -> None:
    """Raise ValueError for more queries than keys."""
    if q_len > k_len:
        raise ValueError(f"queries are the last of the keys: got {q_len} queries and {k_len} keys")


def check_devices(first: Tensor, *rest: Tensor | None) -> None:
    """Raise ValueError for tensors on several devices."""
    device = first.device
    for x in rest:
        if x is not None and x.device != device:
            devices = ", ".join(sorted((str(device), str(x.device))))
            raise ValueError(f"all tensors of a call must share a device, got {devices}")


def check_pages(table: Tensor, batch: int, num_pages: int, *caches: Tensor) -> None:
    """Raise ValueError for a block table, or caches in pages, that kernels cannot read.

    Args:
        table: (batch, n) int32.
        batch: number of sequences.
        num_pages: fewest pages of a sequence.
        caches: (pages, page size, G, dim) each.
    """
    if (
        table.dim() != 2
        or table.dtype != torch.int32
        or table.shape[0] != batch
        or table.shape[1] < num_pages
    ):
        raise ValueError(
            f"the block table must be int32 ({batch}, at least {num_pages}), got {table.dtype} "
            f"{tuple(table.shape)}"
        )
    if any(cache.stride(-1) != 1 for cache in caches):
        raise ValueError("the last dimension of a paged cache must be contiguous")


def check_tokens(tokens: Tensor, batch: int, num_kv_heads: int) -> None:
    """Raise ValueError unless these are lists of rows, of a sequence or of each KV head."""
    if (
        tokens.dtype != torch.int32
        or tokens.shape[:-1] not in ((batch,), (batch, num_kv_heads))
        or tokens.shape[-1] == 0
    ):
        raise ValueError(
            f"tokens must be int32 ({batch}, C) or ({batch}, {num_kv_heads}, C) with C > 0, "
            f"got {tokens.dtype} {tuple(tokens.shape)}"
        )


def check_out(out: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError for memory that an output of this shape, in q's dtype, cannot lie in."""
    check_tensor("out", out)
    if out.shape != shape or out.dtype != q.dtype or out.stride(-1) != 1:
        raise ValueError(
            f"out must be {q.dtype} {shape} with its last dimension contiguous, got {out.dtype} "
            f"{tuple(out.shape)}"
        )
    if _overlaps(out):
        raise ValueError(f"out must not overlap itself, got strides {out.stride()} for {shape}")


def _overlaps(out: Tensor) -> bool:
    """True if two elements may share a place; views cut out of a larger tensor do not."""
    reach = 0
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def unfit(**tensors: Tensor) -> ValueError:
    """The error of tensors whose shapes are not those of one call."""
    return ValueError(f"shapes do not go together: {shapes_of(**tensors)}")


def unlike_dtypes(**tensors: Tensor) -> ValueError:
    """The error of tensors that are not of one floating dtype."""
    dtypes = ", ".join(dict.fromkeys(str(x.dtype) for x in tensors.values()))
    return ValueError(f"{_names(tensors)} must share a floating dtype, got {dtypes}")


def shapes_of(**tensors: Tensor) -> str:
    """Names and shapes, for an error."""
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())


def _names(tensors: Iterable[str]) -> str:
    *names, last = tensors
    return f"{', '.join(names)} and {last}"
