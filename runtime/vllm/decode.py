"""Decode by an artifact's decode section: filter layers attend to everything and choose, others read chosen tokens.

Requests with one new token are served together. What is chosen for them lies in slots that are there as long as the
engine, and neither they nor any launch depends on how long a context is: vLLM may capture a step in a CUDA graph and
replay it for other requests. Requests with several new tokens (drafts) are served one by one, and in no graph.

Shapes: H query heads and G KV heads of this process, n requests, Q new tokens of one, K its keys, S tokens of a page,
D head dim, U choices that a filter layer makes, C tokens that are chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES, decode_attention
from kernels.index import PAD
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.reads import taken
from runtime.omnikv.roles import Role
from runtime.vllm.batch import Ones
from runtime.vllm.options import ranges
from runtime.vllm.pages import parted

# Bytes of scores that a filter layer may have at a time: of more requests they are made in parts.
_SCORES = 1 << 28


class Chooser:
    """The decode section at work in one process. What is chosen holds for one step, by filter layer."""

    def __init__(self, omni: OmniKV, *, requests: int, longest: int) -> None:
        """requests: the most in a step. longest: tokens of the longest sequence."""
        self._omni, self._longest = omni, longest
        self._requests, self._most = requests, min(omni.count(longest), longest)
        # (requests, U, slots) int32 of each filter layer, and how many of the slots are in use in the step.
        self._slots: dict[int, Tensor] = {}
        self._width: dict[int, int] = {}
        # By request, too: what is chosen for several new tokens.
        self._chosen: dict[tuple[int, int], Tensor] = {}

    def __str__(self) -> str:
        filters = [layer for layer, role in self._omni.roles.items() if role.filters]
        served = [layer for layer, role in self._omni.roles.items() if role.filter is not None]
        return f"layers {ranges(served)} read what layers {ranges(filters)} choose"

    @property
    def captures(self) -> bool:
        """Whether a step of single tokens can be replayed for others."""
        return self._omni.coverage is None and self._omni.group is None

    def tokens_read(self) -> float | None:
        """Tokens that a KV head of a layer that is served read for a request in a step, on average; None before any.

        Waits for a GPU.
        """
        return self._omni.tokens_read

    def takes(self, q_len: int) -> bool:
        """Whether requests with so many new tokens are served one by one.

        They are the parent's where choices differ in length: they would not know their places.
        """
        return 1 < q_len <= MAX_QUERIES and self._omni.coverage is None

    def gains(self, k_len: int) -> bool:
        """Whether a context has more keys than are chosen."""
        return k_len > self._omni.count(k_len)

    def role(self, layer: int) -> Role | None:
        """What a layer does, None where that is to attend to everything and no more."""
        role = self._omni.roles.get(layer)
        return role if role is not None and (role.filters or role.filter is not None) else None

    def begin(self) -> None:
        """A new step: nothing is chosen."""
        self._width.clear()
        self._chosen.clear()

    def attend(
        self,
        layer: int,
        role: Role,
        ones: Ones,
        query: Tensor,
        cache: Tensor,
        output: Tensor,
        ours: bool,
        v_scale: float = 1.0,
        **how: Any,
    ) -> None:
        """Write the rows of the requests with one new token to output (T, H, D).

        A filter layer chooses for all of them in one launch, or in as many as its scores take; a layer that it serves
        reads in one. A context no longer than the budget is chosen as a whole. Nothing is read on the host.

        Args:
            layer, role: which one it is, and what it does.
            ones: the requests.
            query: (T, H, D).
            cache: of the layer, with the keys and values of the new tokens.
            ours: how the cache is laid out, see pages.parted.
            v_scale: what stored values are to be multiplied by.
            how: scale, softcap and sinks, as kernels.decode.decode_attention has them.

        Raises:
            HeadwiseError: the filter layer chose nothing in this step.
        """
        k, v = parted(cache, ours)
        table = ones.table if ones.k_len is None else ones.table[:, : -(-ones.k_len // k.shape[1])]
        n, tokens = len(ones.ends), None
        if role.filter is not None:
            if (width := self._width.get(role.filter)) is None:
                raise HeadwiseError(f"filter layer {role.filter} has chosen nothing")
            tokens = taken(self._slots[role.filter][:n, :, :width], role.choices)
        at_once = n if tokens is not None else self._scored(table.shape[1] * k.shape[1], query.shape[1], k.shape[2])
        for begin in range(0, n, at_once):
            some = slice(begin, min(begin + at_once, n))
            rows = _rows(ones.rows, some)
            done = decode_attention(
                query[rows][:, :, None],
                k,
                v,
                tokens=tokens,
                block_table=table[some],
                ends=ones.ends[some],
                scores=self._omni.scores if role.filters else "none",
                **how,
            )
            if done.scores is not None:
                self._choose(layer, role, done.scores, ones.ends, some)
            output[rows] = done.out[:, :, 0] if v_scale == 1 else done.out[:, :, 0] * v_scale

    def rehearse(self, layer: int, role: Role, query: Tensor, cache: Tensor, ours: bool, **how: Any) -> None:
        """Take what a filter layer takes in a step of the most requests with the longest contexts, and keep the slots.

        query: (T, H, D) of any tokens. cache: of one page, which stands for all.
        """
        width = -(-self._longest // parted(cache, ours)[0].shape[1])
        table, ends = (
            torch.full(shape, value, dtype=torch.int32, device=query.device)
            for shape, value in (((self._requests, width), 0), ((self._requests,), 1))
        )
        q = query.new_zeros(self._requests, *query.shape[1:])
        self.attend(
            layer, role, Ones((), slice(0, self._requests), table, ends, None), q, cache, q.clone(), ours, **how
        )
        self.begin()

    def _choose(self, layer: int, role: Role, scores: Tensor, ends: Tensor, some: slice) -> None:
        """Fill the slots of some requests by their scores (n, G, K)."""
        found = self._omni.choose_each(layer, role, scores, ends[some], self._most)
        if layer not in self._slots:
            shape = (self._requests, found.shape[1], self._most)
            self._slots[layer] = torch.full(shape, PAD, dtype=torch.int32, device=found.device)
        self._width[layer] = found.shape[2]
        self._slots[layer][some, :, : found.shape[2]] = found

    def _scored(self, k_len: int, heads: int, kv_heads: int) -> int:
        """Of how many requests a filter layer may have the scores of so many keys at a time.

        The kernel has one for each query head and sums for each KV head, and a choice has copies of those.
        """
        return max(1, _SCORES // (4 * k_len * (heads + 4 * kv_heads)))

    def verify(
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
        """Attention of one request's several new tokens, (1, H, Q, D).

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
            self._chosen[request, layer] = self._omni.choice(layer, role, done.scores[..., :k_len], q.shape[2])
            return done.out
        assert role.filter is not None
        chosen = self._chosen.get((request, role.filter))
        if chosen is None:
            raise HeadwiseError(f"filter layer {role.filter} has chosen nothing")
        return decode_attention(q, **keys, tokens=taken(chosen, role.choices), **how).out


def _rows(rows: slice | Tensor, some: slice) -> slice | Tensor:
    return slice(rows.start + some.start, rows.start + some.stop) if isinstance(rows, slice) else rows[some]
