"""A layer of unlike heads in two: heads that see every key by torch's dense attention, the others by our kernel.

Which heads those are the plan says, by sizes and lengths alone: nothing is read from a device.

Shapes: B batch, H query heads, G KV heads, Q query length, K key length, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.copies import on_device
from kernels.patterns import LayerPlan
from kernels.ragged import Ragged
from runtime.attention.layout import Part
from runtime.attention.reasons import Verdict
from runtime.attention.state import Settings
from runtime.dense import LEAST, faster, sdpa


def by_torch(
    settings: Settings, plan: LayerPlan, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged | None, verdict: Verdict
) -> Sequence[int]:
    """The query heads of a call that see every key and that sdpa is the faster for, as was measured once; maybe none.

    Arguments as for attend_layer, whose call has neither a soft-cap nor sinks, which sdpa has not.
    """
    k_len = k.shape[2]
    if not settings.heads_by_torch or k_len < LEAST:
        return ()
    heads: Sequence[int] = plan.whole(k_len)
    if ragged is not None:
        heads = sorted(set.intersection(*(set(plan.whole(length)) for length in ragged.k_lens)))
    if heads and verdict.sdpa is None:
        verdict.sdpa = faster(q, k, v) == "sdpa"
    return heads if verdict.sdpa else ()


def attend_densely_to(
    out: Tensor, heads: Sequence[int], q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, ragged: Ragged | None
) -> None:
    """Write causal attention over every key into `out` (B, H, Q, E) for these query heads, by sdpa.

    Args:
        out: rows of no sequence, and other heads, stay as they are.
        q, k, v, scale, ragged: as for attend_layer.
    """
    everything = (slice(None), slice(None), slice(None))
    parts = [everything] if ragged is None else [Part(*sequence).places for sequence in ragged.sequences]
    for readers, kv_heads in _groups(heads, q.shape[1] // k.shape[1]):
        mine, its = _heads(readers, q.device), _heads(kv_heads, q.device)
        for rows, queries, keys in parts:
            asked, read, values = q[rows, :, queries][:, mine], k[rows, :, keys][:, its], v[rows, :, keys][:, its]
            out[rows, :, queries][:, mine] = sdpa(asked, read, values, scale)


def _groups(heads: Sequence[int], group: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Query heads, and the KV heads that they read, such that all of these are read by equally many: sdpa wants that.

    Keys and values are copied at most once, and not where neighbouring KV heads have equally many such heads.
    """
    readers: dict[int, list[int]] = {}
    for head in heads:
        readers.setdefault(head // group, []).append(head)
    for count in sorted({len(mine) for mine in readers.values()}):
        its = tuple(kv_head for kv_head, mine in readers.items() if len(mine) == count)
        yield tuple(head for kv_head in its for head in readers[kv_head]), its


def _heads(heads: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """Heads of (B, heads, length, dim) to index with: what is read of neighbours is a view."""
    run = slice(heads[0], heads[-1] + 1)
    return run if heads == tuple(range(run.start, run.stop)) else on_device(heads, device)
