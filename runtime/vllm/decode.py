"""Decode by an artifact's decode section: filter layers attend to everything and choose, others read chosen tokens.

Shapes: H query heads and G KV heads of this process, Q new tokens of a request, K its keys, D head dim, C tokens that
are chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES, decode_attention
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.reads import taken
from runtime.omnikv.roles import Role
from runtime.vllm.options import ranges
from runtime.vllm.pages import parted


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
        ours: bool,
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
            ours: how the cache is laid out, see pages.parted.
            how: scale, softcap and sinks, as kernels.decode.decode_attention has them.

        Raises:
            HeadwiseError: the filter layer chose nothing in this step.
        """
        k, v = parted(cache, ours)
        ends = torch.full((1,), k_len, dtype=torch.int32, device=q.device)
        keys: dict[str, Any] = {"k": k, "v": v, "block_table": pages[None], "ends": ends}
        if role.filters:
            done = decode_attention(q, **keys, scores=self._omni.scores, **how)
            assert done.scores is not None
            self._chosen[request, layer] = self._omni.choice(role, done.scores[..., :k_len], q.shape[2])
            return done.out
        assert role.filter is not None
        chosen = self._chosen.get((request, role.filter))
        if chosen is None:
            raise HeadwiseError(f"filter layer {role.filter} has chosen nothing")
        return decode_attention(q, **keys, tokens=taken(chosen, role.choices), **how).out
