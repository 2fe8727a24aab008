"""Sparse attention in plain fp32 torch, row of tiles by row of tiles: the only oracle.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.call import AttentionCall, Operands
from kernels.index import TILE, SparseIndex
from kernels.ragged import Ragged


def supports(call: Operands) -> str | None:
    """The reason why this backend cannot serve the call: always None."""
    return None


def run(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output (B, H, Q, E) and fp32 log-sum-exp (B, H, Q) of a call."""
    q = call.q
    k = call.k
    v = call.v
    index = call.index
    out = call.out
    batch, num_heads, q_len, _ = q.shape
    lse = torch.full((batch, num_heads, q_len), float("-inf"), device=q.device, dtype=torch.float32)
    if out is None:
        out = q.new_zeros(batch, q_len, num_heads, v.shape[-1]).transpose(1, 2)
    else:
        out.zero_()
    for s in range(index.batch):
        one = index.sequence(s)
        ragged = index.ragged or Ragged.left_padded([index.k_len] * batch, q_len, index.k_len)
        row = ragged.rows[s]
        first_query = ragged.q_starts[s]
        first_key = ragged.k_starts[s]
        if call.block_table is None:
            keys, values = (x[row, :, first_key : first_key + one.k_len] for x in (k, v))
        else:
            pages = call.block_table[s, : -(-one.k_len // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[: one.k_len].transpose(0, 1) for x in (k, v))
        queries = slice(first_query, first_query + one.q_len)
        for head in range(num_heads):
            sink = None
            if call.sinks is not None:
                sink = call.sinks[head].float()
            group = num_heads // keys.shape[0]
            out[row, head, queries], lse[row, head, queries], left_out = _one_head(
                q[row, head, queries].float(),
                keys[head // group].float(),
                values[head // group].float(),
                one,
                head,
                call.factor,
                call.softcap,
                sink,
            )
            if call.skipped is not None:
                call.skipped[s, head] += left_out
    return out, lse


def _one_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: SparseIndex,
    head: int,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, int]:
    """Output (Q, E), log-sum-exp (Q,) and skipped tiles of one head of one sequence."""
    k_len = index.k_len
    offset = index.k_len - index.q_len
    diagonals = index.diagonals[0, head]
    tiles = index.listed()[0, head]
    columns = index.columns[0, head]
    positions = torch.arange(k_len, device=q.device)
    if index.skip is None:
        bound = float("-inf")
    else:
        bound = float(index.skip[0, head])
    outs = []
    lses = []
    skipped = 0
    for row in range(index.num_rows):
        at = index.first_row + row
        first = max(at * TILE, offset)
        last = min((at + 1) * TILE, k_len)
        seen = torch.isin(positions // TILE, torch.cat([at - diagonals, tiles[row]])) | torch.isin(
            positions, columns
        )
        if at >= index.first_dense():
            seen[:] = True
        keys = positions[seen & (positions < last)]
        distance = positions[first:last, None] - keys
        logits = q[first - offset : last - offset] @ k[keys].T * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        outside = (distance < 0) | (distance >= (index.window or k_len))
        logits = logits.masked_fill(outside, float("-inf"))
        if bound > float("-inf") and at < index.first_dense():
            tile = torch.cat([at - diagonals, tiles[row]])
            out_of = _skipped(
                logits, torch.where(torch.isin(keys // TILE, tile), keys // TILE, -1), at, bound
            )
            # Beyond a window there is nothing that could be computed.
            skipped += int(((keys[out_of] // TILE).unique() >= at - index.reach).sum())
            keys = keys[~out_of]
            logits = logits[:, ~out_of]
            outside = outside[:, ~out_of]
        if sink is not None:
            # One more key, which has no value.
            logits = torch.cat([logits, sink.expand(len(logits), 1)], dim=-1)
        lses.append(logits.logsumexp(-1))
        outs.append(_weighted(logits.softmax(-1)[:, : len(keys)], v[keys], ~outside))
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


def _weighted(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """weights (Q, n) times values (n, E), nothing of those that a query does not see (Q, n)."""
    finite = values.isfinite().all(-1)
    out = weights @ values.where(finite[:, None], 0)
    # A weight of zero times NaN is NaN.
    for key in (~finite).nonzero().flatten().tolist():
        out = out + (weights[:, key, None] * values[key]).where(seen[:, key, None], 0)
    return out
