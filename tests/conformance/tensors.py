"""Tensors of every layout, caches of pages, and errors of results.

Shapes: B batch, G KV heads, K key length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.index import PAD


def make_tensor(
    shape: Sequence[int], layout: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal (batch, heads, length, dim); what lies between and around is NaN."""
    batch, heads, length, dim = shape
    if layout == "transposed":
        return make_tensor((batch, length, heads, dim), "", dtype, device).transpose(1, 2)
    if layout == "expanded":
        return make_tensor((1, heads, length, dim), "", dtype, device).expand(batch, -1, -1, -1)
    values = torch.randn(*shape, device=device).to(dtype)
    if layout == "strided":
        around = torch.full((batch, heads + 2, 2 * length + 1, 3 * dim), torch.nan, dtype=dtype)
        view = around.to(device)[:, 1:-1, 1::2, ::3]
        return view.copy_(values)
    return values


def paged(sequences: Sequence[Tensor] | Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(G, K, dim) of each sequence in a shuffled cache, NaN elsewhere; and its table."""
    heads, _, dim = sequences[0].shape
    counts = [-(-x.shape[1] // size) for x in sequences]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(size))
    order = order.to(torch.int32)
    cache = sequences[0].new_full((len(order), size, heads, dim), float("nan"))
    # Places that need no page name one out of bounds, at least one in each row: they must not be
    # read.
    table = torch.full((len(sequences), max(counts) + 1), PAD, dtype=torch.int32)
    for s, (x, pages) in enumerate(zip(sequences, order[:-3].split(counts), strict=True)):
        rows = x.new_full((len(pages) * size, heads, dim), float("nan"))
        rows[: x.shape[1]] = x.transpose(0, 1)
        cache[pages.long()] = rows.unflatten(0, (-1, size))
        table[s, : len(pages)] = pages
    return cache, table.to(cache.device)


def difference(actual: Tensor, expected: Tensor) -> Tensor:
    """Absolute error, infinite for NaN; equal infinities, of rows of nobody, are none."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    return error.masked_fill(actual == expected, 0.0)
