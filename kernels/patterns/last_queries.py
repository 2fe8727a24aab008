"""Attention of the last queries, by which vertical-slash chooses (MInference 1.0, Algorithm 2).

Shapes: B batch, h heads asked for, H query heads, G KV heads, L last queries, Q query length, K key
length, D head dim; in a run n KV heads with m query heads each, S keys that the last queries can
see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import registry
from kernels.copies import on_device
from kernels.patterns.paged import Keys, of_heads, of_sequence, parts

# Bytes of attention rows held at once: on a GPU enough to be busy at 128K tokens and little at 1M;
# on a CPU what stays near its cores and is not handed back to the system after each use.
_SCRATCH_BYTES = {"cpu": 1 << 24}
_SCRATCH_BYTES_ELSEWHERE = 1 << 29


@dataclass(frozen=True, eq=False, slots=True)
class EstimateCall:
    """A call of `estimate`, whose arguments it has."""

    q: Tensor
    k: Keys
    heads: Sequence[int]
    last_q: Sequence[int]
    scale: float
    window: int | None

    @property
    def device(self) -> torch.device:
        return self.q.device


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Heads of one batched product: equally many, `last` queries each, on neighbouring KV heads.

    `members` are places in the list of heads, KV head by KV head.
    """

    last: int
    kv: range
    members: tuple[int, ...]


@torch.no_grad()
def estimate(
    q: Tensor,
    k: Keys,
    heads: Sequence[int],
    last_q: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention mass of each column and diagonal from the last queries (Algorithm 2, lines 1-6).

    Args:
        q: (B, H, Q, D) queries, the last Q of the K positions.
        k: (B, G, K, D) keys, read where they lie, never repeated for the query heads of a KV head.
        heads: the h query heads asked for.
        last_q: for each of them, by how many last queries; Q if there are no more.
        scale: factor on the logits.
        window: how many keys a query sees, itself included; None for all.
        backend: as for sparse_attention; the reference is torch.

    Returns:
        vertical (B, h, K): mass on key j; slash (B, h, K): mass at distance s = query position -
        key position. fp32; each adds up to the number of last queries.
    """
    masses: tuple[Tensor, Tensor] = registry.run(
        "estimate", EstimateCall(q, k, heads, last_q, scale, window), backend
    )
    return masses


class Reference:
    """The estimate in torch, on any device."""

    @staticmethod
    def supports(call: EstimateCall) -> str | None:
        """The reason why this backend cannot serve the call: always None."""
        return None

    @staticmethod
    def run(call: EstimateCall) -> tuple[Tensor, Tensor]:
        """See `estimate`."""
        q = call.q
        k = call.k
        heads = call.heads
        window = call.window
        batch = q.shape[0]
        group = q.shape[1] // k.shape[1]
        k_len = k.shape[2]
        last_q = [min(last, q.shape[2]) for last in call.last_q]
        room = _SCRATCH_BYTES.get(q.device.type, _SCRATCH_BYTES_ELSEWHERE)
        runs = _runs(heads, group, last_q, room // ((q.element_size() + 4) * k_len))
        vertical = torch.zeros(batch, len(heads), k_len, dtype=torch.float32, device=q.device)
        slash = torch.zeros_like(vertical)
        for run in runs:
            members = on_device(run.members, q.device)
            chosen = on_device(tuple(heads[at] for at in run.members), q.device)
            if window is None:
                seen = k_len
            else:
                seen = min(k_len, run.last + window - 1)
            for b in range(batch):
                # Scaled before the product: a product of fp16 could be too large.
                queries = q[b, :, -run.last :].index_select(0, chosen).mul_(call.scale)
                keys = of_heads(of_sequence(k, b, b, 0, k_len), slice(run.kv.start, run.kv.stop))
                some = (each[0] for each in parts(keys, k_len - seen))
                columns, distances = _masses(queries, some, len(run.kv), seen, run.last, window)
                vertical[b, :, k_len - seen :].index_copy_(0, members, columns)
                slash[b, :, :seen].index_copy_(0, members, distances)
        return vertical, slash


def _masses(
    queries: Tensor,
    parts_of_keys: Iterable[Tensor],
    kv_heads: int,
    seen: int,
    last: int,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Mass by key and by distance, (n * m, S) fp32, of queries (n * m, L, D) on keys (n, S, D)."""
    heads, _, dim = queries.shape
    # Rows stand in a wider buffer, each one further right than the one above seen from the
    # diagonal, so that one strided view lines the diagonals up. Rows of a multiple of 8 numbers are
    # what matrix units write best.
    margin = last + -(last + seen) % 8
    logits = queries.new_empty(kv_heads, heads // kv_heads * last, margin + seen)
    logits[..., :margin] = float("-inf")
    at = margin
    for keys in parts_of_keys:
        torch.bmm(
            queries.view(kv_heads, -1, dim),
            keys.transpose(1, 2),
            out=logits[..., at : at + keys.shape[1]],
        )
        at += keys.shape[1]
    rows = logits.view(heads, last, margin + seen)
    corner = torch.ones(last, last, dtype=torch.bool, device=queries.device)
    rows[..., -last:].masked_fill_(corner.triu(1), float("-inf"))
    if window is not None:
        # Query r is key seen - last + r: it sees no key at or below r + seen - last - window.
        rows[..., margin : margin + last].masked_fill_(
            corner.tril(seen - last - window), float("-inf")
        )
    weights = torch.softmax(rows, dim=-1, dtype=torch.float32)
    stride = margin + seen
    lined_up = weights.as_strided(
        (heads, last, seen + 1), (last * stride, stride + 1, 1), margin - last
    )
    return weights[..., margin:].sum(1), lined_up.sum(1)[:, 1:].flip(-1)


def _runs(heads: Sequence[int], group: int, last_q: Sequence[int], most_queries: int) -> list[_Run]:
    """The heads as runs of at most `most_queries` queries, or of one head if that has more."""
    by_key: dict[tuple[int, int], list[int]] = {}
    for at, head in enumerate(heads):
        by_key.setdefault((last_q[at], head // group), []).append(at)
    runs: list[_Run] = []
    for (last, kv_head), members in sorted(by_key.items()):
        most = max(1, most_queries // last)
        for start in range(0, len(members), most):
            some = tuple(members[start : start + most])
            if runs:
                former = runs[-1]
            else:
                former = None
            if (
                former
                and (former.last, former.kv.stop, len(former.members))
                == (last, kv_head, len(some) * len(former.kv))
                and len(former.members) + len(some) <= most
            ):
                kv = range(former.kv.start, kv_head + 1)
                joined = former.members + some
                runs[-1] = _Run(last=last, kv=kv, members=joined)
            else:
                runs.append(_Run(last=last, kv=range(kv_head, kv_head + 1), members=some))
    return runs
