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
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: LayerMask | None = None,
) -> Tensor:
    """softmax(softcap(scale q k^T) under the mask, with the sinks) v; causal without a mask.

    Args:
        q: (1, H, S, D).
        k: (1, G, S, D).
        v: (1, G, S, E).
        scale: factor on the logits.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them.
        sinks: (H,) learned sinks, None for none.
        mask: what each query sees; causal if None.

    Returns:
        (1, H, S, E) in q's dtype.
    """
    heads = q.shape[1]
    length = q.shape[2]
    plain = softcap is None and sinks is None
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
        attend = partial(_explicit, scale=scale, softcap=softcap, sinks=sinks)
        if plain:
            attend = partial(_plain, scale=scale)
        if torch.is_grad_enabled():
            # Else every block's scores would be kept for the way back.
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        out[:, :, start : queries.stop] = attend(*part, visible)
    return out


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float) -> Tensor:
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=visible, scale=scale)


def _causal(queries: range, keys: range, device: torch.device) -> Tensor:
    rows = torch.arange(queries.start, queries.stop, device=device)[:, None]
    return (rows >= torch.arange(keys.start, keys.stop, device=device))[None, None]


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    groups = k.shape[1]
    grouped = q.float().unflatten(1, (groups, -1))
    scores = grouped @ k.float().unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, :, None], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)
