"""Gradients of dense attention in plain torch, a block of queries at a time: the oracle.

Shapes: B batch, H query heads, G KV heads, M = H // G, Q query length, K key length, R rows of a
block, D head dim, E value dim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.call import GradientCall
from kernels.index import TILE

# Scores held at a time: 64 MiB in fp32.
_SCORES = 1 << 24


class _Block(NamedTuple):
    """Some queries, their keys, and their logits (B, G, M, R, keys), -inf where none is seen."""

    queries: slice
    keys: slice
    logits: Tensor


def supports(call: GradientCall) -> str | None:
    """The reason why this backend cannot serve the call: always None."""
    return None


def run(call: GradientCall) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v of a call; at least in fp32."""
    q = call.q
    k = call.k
    v = call.v
    scale = call.factor
    softcap = call.softcap
    skip_below = call.skip_below
    q_heads, out_heads, by_out = (_by_group(x, k.shape[1]) for x in (q, call.out, call.grad_out))
    k_heads = _wide(k)
    v_heads = _wide(v)
    lse_heads = _wide(call.lse).unflatten(1, (k.shape[1], -1))
    delta = (out_heads * by_out).sum(-1)
    dq, dk, dv = (torch.zeros_like(x) for x in (q_heads, k_heads, v_heads))
    offset = k.shape[2] - q.shape[2]
    for queries, keys, logits in _blocks(q_heads, k_heads, scale, softcap, call.window):
        p = (logits - lse_heads[..., queries, None]).exp()
        if skip_below > 0:
            p = _without_small_tiles(p, offset + queries.start, keys.start, skip_below)
        dv[:, :, keys] += torch.einsum("bgmrk,bgmre->bgke", p, by_out[..., queries, :])
        dp = by_out[..., queries, :] @ v_heads[:, :, None, keys].transpose(-1, -2)
        ds = p * (dp - delta[..., queries, None]) * scale
        if softcap is not None:
            ds *= 1 - (logits.masked_fill(logits.isinf(), 0) / softcap) ** 2
        dq[..., queries, :] = ds @ k_heads[:, :, None, keys]
        dk[:, :, keys] += torch.einsum("bgmrk,bgmrd->bgkd", ds, q_heads[..., queries, :])
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _by_group(x: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, ...) -> (B, G, M, ...)."""
    return _wide(x).unflatten(1, (num_kv_heads, -1))


def _blocks(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, window: int | None
) -> Iterator[_Block]:
    """Blocks of (B, G, M, Q, D) queries, cut where tiles of positions begin."""
    batch, kv_heads, heads, q_len, _ = q.shape
    k_len = k.shape[2]
    offset = k_len - q_len
    rows = max(1, _SCORES // (batch * kv_heads * heads * k_len * TILE)) * TILE
    end = offset
    while end < k_len:
        start = end
        end = min((end // rows + 1) * rows, k_len)
        if window is None:
            first = 0
        else:
            first = max(0, start - window + 1) // TILE * TILE
        logits = (
            q[..., start - offset : end - offset, :]
            @ k[:, :, None, first:end].transpose(-1, -2)
            * scale
        )
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        distance = torch.arange(start, end, device=q.device)[:, None] - torch.arange(
            first, end, device=q.device
        )
        outside = (distance < 0) | (distance >= (window or k_len))
        yield _Block(
            slice(start - offset, end - offset),
            slice(first, end),
            logits.masked_fill(outside, float("-inf")),
        )


def _without_small_tiles(p: Tensor, first_query: int, first_key: int, least: float) -> Tensor:
    """p (..., R, keys) with zeros in 64 x 64 tiles whose largest probability is below `least`."""
    rows, keys = p.shape[-2:]
    before = first_query % TILE
    above = F.pad(p, (0, -(first_key + keys) % TILE, before, -(first_query + rows) % TILE))
    peaks = above.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).amax((-3, -1))
    kept = (peaks >= least).repeat_interleave(TILE, -1).repeat_interleave(TILE, -2)
    return p * kept[..., before : before + rows, :keys]
