"""Dense attention in blocks of queries, for layers that sdpa cannot serve without an S x S mask.

Shapes: H query heads, G KV heads, S length, D head dim, E value dim; batch 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.logits import PLAIN, Logits, softmax, wide

BLOCK = 256
# Scores held at a time: 64 MiB in fp32.
_SCORES = 1 << 24


@dataclass(frozen=True, eq=False)
class LayerMask:
    """A local causal mask made in blocks: no query sees a key `local_size` or more tokens back.

    `standin` is the one-element placeholder that the model passes around in its place.
    """

    standin: Tensor
    function: Callable[..., Any]
    local_size: int
    use_vmap: bool

    def piece(self, queries: range, keys: range) -> Tensor:
        """(1, 1, queries, keys) bool, True where the query sees the key."""
        from transformers.masking_utils import sdpa_mask

        block = sdpa_mask(
            batch_size=1,
            q_length=len(queries),
            kv_length=len(keys),
            q_offset=queries.start,
            kv_offset=keys.start,
            mask_function=self.function,
            allow_is_causal_skip=False,
            use_vmap=self.use_vmap,
            device=self.standin.device,
        )
        assert block is not None
        return block


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    logits: Logits = PLAIN,
    mask: LayerMask | None = None,
) -> Tensor:
    """Attention under the mask; causal without one.

    Args:
        q: (1, H, S, D).
        k: (1, G, S, D).
        v: (1, G, S, E).
        logits: scale, soft-cap and learned sinks. A window is the mask's.
        mask: what each query sees; causal if None.

    Returns:
        (1, H, S, E) in q's dtype.
    """
    heads = q.shape[1]
    length = q.shape[2]
    plain = logits.softcap is None and logits.sinks is None
    if plain:
        block = BLOCK
    else:
        block = max(1, min(BLOCK, _SCORES // (heads * length)))
    if mask is None:
        reach = length
    else:
        reach = mask.local_size
    out = q.new_empty(1, heads, length, v.shape[-1])
    for start in range(0, length, block):
        queries = range(start, min(start + block, length))
        keys = range(max(0, start - reach), queries.stop)
        if mask is None:
            visible = _causal(queries, keys, q.device)
        else:
            visible = mask.piece(queries, keys)
        part = (
            q[:, :, start : queries.stop],
            k[:, :, keys.start : keys.stop],
            v[:, :, keys.start : keys.stop],
        )
        attend = partial(_plain if plain else _explicit, logits=logits)
        if torch.is_grad_enabled():
            # Else every block's scores would be kept for the way back.
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        out[:, :, start : queries.stop] = attend(*part, visible)
    return out


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, logits: Logits) -> Tensor:
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, wide_k, wide_v, attn_mask=visible, scale=logits.factor(q.shape[3])
    )


def _causal(queries: range, keys: range, device: torch.device) -> Tensor:
    rows = torch.arange(queries.start, queries.stop, device=device)[:, None]
    return (rows >= torch.arange(keys.start, keys.stop, device=device))[None, None]


def _explicit(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, logits: Logits) -> Tensor:
    groups = k.shape[1]
    sinks = logits.sinks
    if sinks is not None:
        sinks = sinks.view(groups, -1, 1)
    scores = logits.compute(q.unflatten(1, (groups, -1)), k.unsqueeze(2), visible[:, :, None])
    weights, _ = softmax(scores, sinks)
    return (weights @ wide(v).unsqueeze(2)).flatten(1, 2).to(q.dtype)
