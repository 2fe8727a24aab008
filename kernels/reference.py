"""The oracle: attention, scores, gradients and estimates in fp32, plain torch, slow and obvious.

Each is mask -> logits -> softmax. Scores and estimates are sums of the probabilities, gradients are
autograd's. As a backend it serves every call on any device, with derivatives.

Shapes: B batch, H query heads, G KV heads, M = H // G, Q query length, K key length, C chosen keys,
D head dim, E value dim, R rows of a block of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.call import AttentionCall, DecodeCall, Decoded, GradientCall
from kernels.index import TILE, SparseIndex
from kernels.logits import softmax, wide
from kernels.patterns.last_queries import EstimateCall, Masses
from kernels.patterns.paged import of_heads, of_sequence, parts
from kernels.ragged import Ragged

# Logits of a gradient that exist at a time: 64 MiB in fp32.
_LOGITS = 1 << 24
# Queries of a decode call whose logits exist at a time.
_QUERIES = 64


class _ServesAll:
    """A backend without limits."""

    @staticmethod
    def supports(call: object) -> str | None:
        """The reason why this backend cannot serve the call: always None."""
        return None


class Attention(_ServesAll):
    """Sparse attention, one row of tiles of one head at a time."""

    @staticmethod
    def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Output (B, H, Q, E) and fp32 log-sum-exp (B, H, Q) of a call."""
        q, k, v, index, out = call.q, call.k, call.v, call.index, call.out
        batch, num_heads, q_len, _ = q.shape
        lse = torch.full(
            (batch, num_heads, q_len), float("-inf"), device=q.device, dtype=torch.float32
        )
        if out is None:
            out = q.new_zeros(batch, q_len, num_heads, v.shape[-1]).transpose(1, 2)
        else:
            out.zero_()
        for s in range(index.batch):
            alone = index.sequence(s)
            ragged = index.ragged or Ragged.left_padded([index.k_len] * batch, q_len, index.k_len)
            row = ragged.rows[s]
            queries = slice(ragged.q_starts[s], ragged.q_starts[s] + alone.q_len)
            if call.block_table is None:
                first = ragged.k_starts[s]
                keys, values = (x[row, :, first : first + alone.k_len] for x in (k, v))
            else:
                table = call.block_table[s : s + 1]
                keys, values = (_unpaged(x, table)[0, :, : alone.k_len] for x in (k, v))
            for head in range(num_heads):
                kv_head = head // (num_heads // keys.shape[0])
                out[row, head, queries], lse[row, head, queries], skipped = _one_head(
                    call, alone, head, q[row, head, queries], keys[kv_head], values[kv_head]
                )
                if call.skipped is not None:
                    call.skipped[s, head] += skipped
        return out, lse


class Decode(_ServesAll):
    """Decode over all or chosen keys, and a prompt with summed scores."""

    @staticmethod
    def run(call: DecodeCall) -> Decoded:
        """Results of a call: out, log-sum-exp and scores (B, G, C or K)."""
        q, k, v = call.q, call.k, call.v
        if call.block_table is not None:
            k, v = (_unpaged(x, call.block_table) for x in (k, v))
        batch, _, q_len, _ = q.shape
        _, num_kv_heads, k_len, _ = k.shape
        if call.tokens is None:
            keys = torch.arange(k_len, device=q.device).view(1, 1, 1, k_len)
        else:
            keys = call.tokens.long().view(batch, -1, 1, call.tokens.shape[-1])
        first: Tensor | int = 0
        if call.starts is not None:
            first = call.starts.view(-1, 1, 1, 1)
        end: Tensor | int = k_len
        if call.ends is not None:
            end = call.ends.view(-1, 1, 1, 1)
        sinks = call.logits.sinks
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, -1, 1)
        window = call.logits.window
        position = end - q_len + torch.arange(q_len, device=q.device).view(-1, 1)
        outs = []
        lses = []
        scores = torch.zeros((), device=q.device, dtype=torch.float32)
        for begin in range(0, q_len, _QUERIES):
            rows = slice(begin, begin + _QUERIES)
            at = position[..., rows, :]
            seen = (keys >= first) & (keys <= at) & (keys < k_len)
            if window is not None:
                seen = seen & (keys > at - window)
            seen = seen.expand(batch, num_kv_heads, -1, -1)
            weights, lse = softmax(
                call.logits.compute(
                    q[:, :, rows].unflatten(1, (num_kv_heads, -1)),
                    _rows(k, keys, seen)[:, :, None],
                    seen[:, :, None],
                ),
                sinks,
            )
            out = weights @ _rows(v, keys, seen)[:, :, None]
            outs.append(out.flatten(1, 2).transpose(1, 2).to(q.dtype))
            lses.append(lse.flatten(1, 2).float())
            if call.scores == "sum":
                scores = scores + weights.sum((2, 3))
            elif call.scores == "max":
                scores = torch.maximum(scores, weights.amax((2, 3)))
        mass = None
        if call.scores != "none":
            mass = scores.float()
        return Decoded(torch.cat(outs, 1).transpose(1, 2), torch.cat(lses, 2), mass)


class Gradient(_ServesAll):
    """Gradients of dense attention by autograd, a block of queries at a time."""

    @staticmethod
    def run(call: GradientCall) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by q, k and v of a call."""
        num_kv_heads = call.k.shape[1]
        q_len = call.q.shape[2]
        k_len = call.k.shape[2]
        offset = k_len - q_len
        # Whole tiles of positions.
        rows = max(1, _LOGITS // (call.q.shape[0] * call.q.shape[1] * k_len * TILE)) * TILE
        with torch.inference_mode(False), torch.enable_grad():
            k, v = (wide(x).detach().clone().requires_grad_() for x in (call.k, call.v))
            # (B, G, M, Q, any).
            q, out, by_out = (
                wide(x).detach().clone().unflatten(1, (num_kv_heads, -1))
                for x in (call.q, call.out, call.grad_out)
            )
            whole = wide(call.lse).detach().clone().unflatten(1, (num_kv_heads, -1))
            dq = torch.zeros_like(q)
            dk = torch.zeros_like(k)
            dv = torch.zeros_like(v)
            end = offset
            while end < k_len:
                start = end
                end = min((end // rows + 1) * rows, k_len)
                block = slice(start - offset, end - offset)
                some = q[..., block, :].requires_grad_()
                seen = _causal(start, end, end, call.logits.window, q.device)
                logits = call.logits.compute(some, k[:, :, None, :end], seen)
                weights = (logits - whole[..., block, None]).exp()
                delta = (out[..., block, :] * by_out[..., block, :]).sum(-1)
                # The log-sum-exp is an input: the second sum stands for its derivative.
                loss = (weights @ v[:, :, None, :end] * by_out[..., block, :]).sum()
                loss = loss - (weights.sum(-1) * delta).sum()
                gradients = torch.autograd.grad(loss, (some, k, v))
                dq[..., block, :] = gradients[0]
                dk += gradients[1]
                dv += gradients[2]
        return dq.flatten(1, 2).to(call.q.dtype), dk.to(call.k.dtype), dv.to(call.v.dtype)


class Estimate(_ServesAll):
    """Attention mass by key and by distance from the last queries, one head at a time."""

    @staticmethod
    def run(call: EstimateCall) -> Masses:
        """See kernels.patterns.last_queries.estimate."""
        q = call.q
        k = call.k
        k_len = k.shape[2]
        vertical = q.new_zeros(q.shape[0], len(call.heads), k_len, dtype=torch.float32)
        slash = torch.zeros_like(vertical)
        for b in range(q.shape[0]):
            sequence = of_sequence(k, b, b, 0, k_len)
            for i, (head, last_q) in enumerate(zip(call.heads, call.last_q, strict=True)):
                last = min(last_q, q.shape[2])
                kv_head = head // (q.shape[1] // k.shape[1])
                keys = parts(of_heads(sequence, slice(kv_head, kv_head + 1)))
                queries = wide(q[b, head, -last:])
                logits = torch.cat([queries @ wide(each[0, 0]).T for each in keys], -1)
                seen = _causal(k_len - last, k_len, k_len, call.window, q.device)
                weights, _ = softmax((logits * call.scale).masked_fill(~seen, float("-inf")))
                vertical[b, i] = weights.sum(0)
                for row in range(last):
                    # Position of the query: distance 0 is its own key.
                    at = k_len - last + row
                    slash[b, i, : at + 1] += weights[row, : at + 1].flip(0)
        return Masses(vertical, slash)


def _one_head(
    call: AttentionCall, index: SparseIndex, head: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Output (Q, E), log-sum-exp (Q,) and skipped tiles of one head of one sequence."""
    offset = index.k_len - index.q_len
    listed = index.padded_tiles()[0, head]
    positions = torch.arange(index.k_len, device=q.device)
    bound = float("-inf") if index.skip is None else float(index.skip[0, head])
    sink = None if call.logits.sinks is None else call.logits.sinks[head]
    outs = []
    lses = []
    skipped = 0
    for row in range(index.num_rows):
        at = index.first_row + row
        dense = at >= index.dense_from()
        first = max(at * TILE, offset)
        last = min((at + 1) * TILE, index.k_len)
        in_tiles = torch.isin(
            positions // TILE, torch.cat([at - index.diagonals[0, head], listed[row]])
        )
        computed = in_tiles | torch.isin(positions, index.columns[0, head])
        if dense:
            computed[:] = True
        keys = positions[computed & (positions < last)]
        seen = _causal(first, last, last, index.window, q.device)[:, keys]
        logits = call.logits.compute(q[first - offset : last - offset], k[keys], seen)
        if bound > float("-inf") and not dense:
            tiles = torch.where(in_tiles[keys], keys // TILE, -1)
            low = _skipped(logits, tiles, at, bound)
            # Beyond a window there is nothing that could be computed.
            skipped += int((tiles[low].unique() >= at - index.window_tiles).sum())
            logits = logits.masked_fill(low, float("-inf"))
        weights, lse = softmax(logits, sink)
        # Memory that no query sees may hold anything: zero times NaN is NaN.
        outs.append(weights @ wide(v[keys]).where(seen.any(0)[:, None], 0))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses), skipped


def _skipped(logits: Tensor, tiles: Tensor, own: int, bound: float) -> Tensor:
    """Mask (n,) of the keys that lie in skipped tiles of a row.

    Args:
        logits: (Q, n).
        tiles: (n,) of each key, -1 of columns.
        own: the row's tile.
        bound: the log of the threshold.
    """
    anchor = logits[:, (tiles <= 0) | (tiles == own)].amax(-1)
    # Where the anchor is not a number, or infinite, nothing is known to be below it.
    limit = torch.where(anchor.isfinite(), anchor + bound, float("nan"))
    counts = ~(logits < limit[:, None]).all(0)
    return (tiles > 0) & (tiles != own) & ~torch.isin(tiles, tiles[counts])


def _causal(start: int, end: int, k_len: int, window: int | None, device: torch.device) -> Tensor:
    """(end - start, k_len): which keys the queries at positions start ... end - 1 see."""
    distance = torch.arange(start, end, device=device)[:, None] - torch.arange(k_len, device=device)
    return (distance >= 0) & (distance < (window or end))


def _rows(x: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Rows (B, G, C, dim) of x (B, G, K, dim), zeros where no query sees the row."""
    batch, num_kv_heads, k_len, dim = x.shape
    at = keys[:, :, 0].clamp(0, k_len - 1).expand(batch, num_kv_heads, -1)
    rows = wide(x).gather(2, at[..., None].expand(-1, -1, -1, dim))
    return rows.where(seen.any(2)[..., None], 0)


def _unpaged(cache: Tensor, block_table: Tensor) -> Tensor:
    """(B, G, K, dim) from pages (pages, page size, G, dim); page 0 replaces invalid numbers."""
    pages = block_table.where((block_table >= 0) & (block_table < cache.shape[0]), 0).long()
    return cache[pages].flatten(1, 2).transpose(1, 2)
