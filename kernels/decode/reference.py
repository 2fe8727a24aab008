"""Decode over all or chosen keys in plain fp32 torch: slow, obvious, and the only oracle.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, C chosen keys, D head dim,
E value dim."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.call import DecodeCall, Decoded, Operands

# Queries of a prompt whose rows of attention exist at a time.
_QUERIES = 64


def supports(call: Operands) -> str | None:
    """The reason why this backend cannot serve the call: always None."""
    return None


def run(call: DecodeCall) -> Decoded:
    """Results of a call: out, log-sum-exp and scores (B, G, C or K)."""
    if call.is_prompt:
        return _with_sums(call)
    k = call.k
    v = call.v
    if call.block_table is not None:
        k = _unpaged(k, call.block_table)
        v = _unpaged(v, call.block_table)
    return _attend(call, call.q, k, v)


def _with_sums(call: DecodeCall) -> Decoded:
    """Results of a prompt, with summed scores, some queries at a time."""
    q_len = call.q.shape[2]
    k_len = call.k.shape[2]
    outs = []
    sums = []
    scores = torch.zeros(call.k.shape[:3], device=call.device, dtype=torch.float32)
    for begin in range(0, q_len, _QUERIES):
        end = min(begin + _QUERIES, q_len)
        seen = k_len - q_len + end
        keys = call.k[:, :, :seen]
        values = call.v[:, :, :seen]
        out, lse, mass = _attend(call, call.q[:, :, begin:end], keys, values)
        assert mass is not None
        outs.append(out.transpose(1, 2))
        sums.append(lse)
        scores = scores + torch.nn.functional.pad(mass, (0, k_len - seen))
    return Decoded(torch.cat(outs, dim=1).transpose(1, 2), torch.cat(sums, dim=2), scores)


def _attend(call: DecodeCall, q: Tensor, k: Tensor, v: Tensor) -> Decoded:
    """Results for some of a call's queries, the last of these keys (B, G, K, D)."""
    tokens = call.tokens
    starts = call.starts
    ends = call.ends
    (batch, num_heads, q_len, _) = q.shape
    num_kv_heads = k.shape[1]
    k_len = k.shape[2]
    if tokens is None:
        rows = torch.arange(k_len, device=q.device).view(1, 1, 1, k_len)
    else:
        rows = tokens.long().view(batch, -1, 1, tokens.shape[-1])
    if starts is None:
        first = torch.zeros(batch, device=q.device, dtype=torch.long)
    else:
        first = starts
    if ends is None:
        last = torch.full((batch,), k_len, device=q.device, dtype=torch.long)
    else:
        last = ends
    at = last.view(-1, 1, 1, 1) - q_len + torch.arange(q_len, device=q.device).view(-1, 1)
    seen = (rows >= first.view(-1, 1, 1, 1)) & (rows <= at) & (rows < k_len)
    if call.window is not None:
        seen &= rows > at - call.window
    seen = seen.expand(batch, num_kv_heads, -1, -1)
    keys, values = (_chosen(x, rows, seen) for x in (k, v))
    queries = q.float().view(batch, num_kv_heads, -1, q_len, q.shape[-1])
    logits = torch.einsum("bgnqd,bgkd->bgnqk", queries, keys) * call.factor
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~seen[:, :, None], float("-inf"))
    lse = logits.logsumexp(-1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.float().view(num_kv_heads, -1, 1))
    shares = (logits - lse.where(lse > float("-inf"), 0)[..., None]).exp()
    out = _weighted(shares, values, seen).to(q.dtype).reshape(batch, num_heads, q_len, -1)
    mass = {"none": None, "sum": shares.sum((2, 3)), "max": shares.amax((2, 3))}[call.scores]
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return Decoded(out, lse.view(batch, num_heads, q_len), mass)


def _weighted(shares: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Shares (B, G, n, Q, C) times values (B, G, C, E), without those a query does not see."""
    finite = values.isfinite().all(-1)
    out = torch.einsum("bgnqk,bgke->bgnqe", shares, values.where(finite[..., None], 0))
    if values.is_meta:
        # It has a shape and no values, so none that is not finite.
        return out
    # A share of zero times NaN is NaN.
    for b, g, key in (~finite).nonzero().tolist():
        added = shares[b, g, :, :, key, None] * values[b, g, key]
        out[b, g] += added.where(seen[b, g, :, key, None], 0)
    return out


def _unpaged(cache: Tensor, block_table: Tensor) -> Tensor:
    """(B, G, K, dim) from pages (pages, page size, G, dim); what is no page becomes page 0."""
    pages = block_table.where((block_table >= 0) & (block_table < cache.shape[0]), 0).long()
    return cache[pages].flatten(1, 2).transpose(1, 2)


def _chosen(x: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """fp32 rows (B, G, C, dim) of x (B, G, K, dim); zeros where no query sees the row."""
    batch, num_kv_heads, k_len, dim = x.shape
    at = rows[:, :, 0].clamp(0, k_len - 1).expand(batch, num_kv_heads, -1)
    taken = x.float().gather(2, at[..., None].expand(-1, -1, -1, dim))
    return taken.where(seen.any(2)[..., None], 0)
