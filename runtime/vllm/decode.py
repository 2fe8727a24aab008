"""Decode by an artifact's decode section: filter layers attend to everything and choose, others read chosen tokens.

Shapes: H query heads and G KV heads of this process, Q new tokens of a request, K its keys, D head dim, C tokens that
are chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES, Decoded, decode_attention
from kernels.index import PAD
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.reads import taken
from runtime.omnikv.roles import Role
from runtime.vllm.options import ranges
from runtime.vllm.pages import Packed, paged


class Chooser:
    """The decode section at work in one process. What is chosen holds for one step, by request and filter layer."""

    def __init__(self, omni: OmniKV) -> None:
        self._omni = omni
        self._chosen: dict[tuple[int, int], Tensor] = {}

    def __str__(self) -> str:
        filters = [layer for layer, role in self._omni.roles.items() if role.filters]
        served = [layer for layer, role in self._omni.roles.items() if role.filter is not None]
        return f"layers {ranges(served)} read what layers {ranges(filters)} choose"

    def serves(self, q_len: int, k_len: int) -> bool:
        """Whether a request gains from choosing: few new tokens, more keys than are chosen.

        Several new tokens are the parent's where choices differ in length: they would not know their places.
        """
        few = q_len == 1 or (q_len <= MAX_QUERIES and self._omni.coverage is None)
        return few and k_len > self._omni.count(k_len)

    def role(self, layer: int) -> Role | None:
        """What a layer does, None where that is to attend to everything and no more."""
        role = self._omni.roles.get(layer)
        return role if role is not None and (role.filters or role.filter is not None) else None

    def begin(self) -> None:
        """A new step: nothing is chosen."""
        self._chosen.clear()

    def attend(
        self,
        layer: int,
        role: Role,
        request: int,
        q: Tensor,
        cache: Tensor,
        pages: Tensor,
        k_len: int,
        reader: Packed | None,
        **how: Any,
    ) -> Tensor:
        """Attention of one request's new tokens, (1, H, Q, D).

        Args:
            layer, role: which one it is, and what it does.
            request: its number in the step.
            q: (1, H, Q, D).
            cache: of the layer, with the keys and values of the new tokens.
            pages: (N,) int32 of the request.
            k_len: K.
            reader: how a packed cache is read; None where kernels read pages.
            how: scale, softcap and sinks, as kernels.decode.decode_attention has them.

        Raises:
            HeadwiseError: the filter layer chose nothing in this step.
        """
        if role.filters:
            done = _over_all(q, cache, pages, k_len, reader, scores=self._omni.scores, **how)
            assert done.scores is not None
            self._chosen[request, layer] = self._omni.choice(role, done.scores[..., :k_len], q.shape[2])
            return done.out
        assert role.filter is not None
        chosen = self._chosen.get((request, role.filter))
        if chosen is None:
            raise HeadwiseError(f"filter layer {role.filter} has chosen nothing")
        return _over_chosen(q, cache, pages, k_len, reader, taken(chosen, role.choices), **how)


def _over_all(q: Tensor, cache: Tensor, pages: Tensor, k_len: int, reader: Packed | None, **how: Any) -> Decoded:
    if reader is not None:
        keys = reader(cache, pages, k_len)
        return decode_attention(q, keys.k, keys.v, **how)
    return decode_attention(q, **_in_pages(q, cache, pages, k_len), **how)


def _over_chosen(
    q: Tensor, cache: Tensor, pages: Tensor, k_len: int, reader: Packed | None, tokens: Tensor, **how: Any
) -> Tensor:
    """tokens: (1, C) for all KV heads or (1, G, C)."""
    if reader is None:
        return decode_attention(q, **_in_pages(q, cache, pages, k_len), tokens=tokens, **how).out
    rows = tokens if tokens.dim() == 2 else tokens[0]
    k, v = reader.rows(cache, pages, torch.where(rows == PAD, 0, rows))
    places = torch.arange(rows.shape[-1], dtype=torch.int32)
    return decode_attention(q, k, v, tokens=torch.where(tokens == PAD, PAD, places), **how).out


def _in_pages(q: Tensor, cache: Tensor, pages: Tensor, k_len: int) -> dict[str, Any]:
    keys = paged(cache, pages, k_len, read=False)
    assert keys.table is not None
    ends = torch.full((1,), k_len, dtype=torch.int32, device=q.device)
    return {"k": keys.k, "v": keys.v, "block_table": keys.table, "ends": ends}
