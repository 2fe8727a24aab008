"""Decode by an artifact's decode section: filter layers attend to everything and choose, others read chosen tokens.

Requests with equally many new tokens are served together. What is chosen for one token each lies in slots that are
there as long as the engine, and neither they nor any launch depends on how long a context is: vLLM may capture a step
in a CUDA graph and replay it for other requests. Several new tokens (drafts) are in no graph.

Shapes: T tokens of a step, H query heads and G KV heads of this process, n requests, K keys of one, D head dim,
U choices that a filter layer makes, C tokens that are chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES, decode_attention
from kernels.index import PAD
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.roles import Role
from runtime.vllm.batch import Few
from runtime.vllm.options import ranges
from runtime.vllm.pages import Pages

# Bytes of scores that a filter layer may have at a time: of more requests they are made in parts.
_SCORES = 1 << 28


class Chooser:
    """The decode section at work in one process. What is chosen holds for one step, by filter layer."""

    def __init__(self, omni: OmniKV, *, requests: int, longest: int) -> None:
        """requests: the most in a step. longest: tokens of the longest sequence."""
        self._omni, self._longest = omni, longest
        self._requests, self._most = requests, min(omni.count(longest), longest)
        # (requests, U, slots) int32 of each filter layer.
        self._slots: dict[int, Tensor] = {}
        # By filter layer and number of new tokens: what is chosen in the step, (n, U, C) int32.
        self._chosen: dict[tuple[int, int], Tensor] = {}

    def __str__(self) -> str:
        filters = [layer for layer, role in self._omni.roles.items() if role.filters]
        served = [layer for layer, role in self._omni.roles.items() if role.filter is not None]
        return f"layers {ranges(served)} read what layers {ranges(filters)} choose"

    @property
    def captures(self) -> bool:
        """Whether a step of single tokens can be replayed for others."""
        return self._omni.section.coverage is None and self._omni.group is None

    def tokens_read(self) -> float | None:
        """Tokens that a KV head of a layer that is served read for a request in a step, on average; None before any.

        Waits for a GPU.
        """
        return self._omni.tokens_read

    def takes(self, q_len: int) -> bool:
        """Whether requests with so many new tokens, which are several, are served.

        They are the parent's where choices differ in length: they would not know their places.
        """
        return 1 < q_len <= MAX_QUERIES and self._omni.section.coverage is None

    def gains(self, k_len: int) -> bool:
        """Whether a context has more keys than are chosen."""
        return k_len > self._omni.count(k_len)

    def role(self, layer: int) -> Role | None:
        """What a layer does, None where that is to attend to everything and no more."""
        role = self._omni.roles.get(layer)
        return role if role is not None and (role.filters or role.filter is not None) else None

    def begin(self) -> None:
        """A new step: nothing is chosen."""
        self._chosen.clear()

    def attend(self, layer: int, role: Role, few: Few, query: Tensor, pages: Pages, output: Tensor, **how: Any) -> None:
        """Write the rows of these requests to output (T, H, D).

        A filter layer attends to everything and chooses; others attend to what was chosen for them, of contexts within
        the budget to everything. Of requests with one new token nothing is read on the host.

        Args:
            layer, role: which one it is, and what it does.
            few: the requests.
            query: (T, H, D).
            pages: of the layer, with the keys and values of the new tokens.
            how: scale, softcap and sinks, as kernels.decode.decode_attention has them.

        Raises:
            HeadwiseError: the filter layer chose nothing in this step.
        """
        table, n = few.pages(pages.size), len(few.ends)
        tokens, chosen = None, None
        if role.filter is not None:
            if (role.filter, few.q_len) not in self._chosen:
                raise HeadwiseError(f"filter layer {role.filter} has chosen nothing")
            tokens = role.taken(self._chosen[role.filter, few.q_len])
        heads, kv_heads = query.shape[1] * few.q_len, pages.k.shape[2]
        at_once = n if tokens is not None else self._scored(table.shape[1] * pages.size, heads, kv_heads)
        for begin in range(0, n, at_once):
            some = slice(begin, min(begin + at_once, n))
            done = decode_attention(
                few.queries(query, some),
                pages.k,
                pages.v,
                tokens=tokens,
                block_table=table[some],
                ends=few.ends[some],
                scores=self._omni.scores if role.filters else "none",
                **how,
            )
            if done.scores is not None:
                most = max(self._most, few.q_len)
                found = self._omni.choose_each(layer, role, done.scores, few.ends[some], most, q_len=few.q_len)
                chosen = self._room(layer, few, found) if chosen is None else chosen
                chosen[some] = found
            out = done.out.transpose(1, 2).flatten(0, 1)
            output[few.rows_of(some)] = out if pages.v_scale == 1 else out * pages.v_scale
        if chosen is not None:
            self._chosen[layer, few.q_len] = chosen

    def rehearse(self, layer: int, role: Role, query: Tensor, pages: Pages, **how: Any) -> None:
        """Take what a filter layer takes in a step of the most requests with the longest contexts, and keep the slots.

        query: (T, H, D) of any tokens. pages: one page, which stands for all.
        """
        width = -(-self._longest // pages.size)
        table, ends = (
            torch.full(shape, value, dtype=torch.int32, device=query.device)
            for shape, value in (((self._requests, width), 0), ((self._requests,), 1))
        )
        q = query.new_zeros(self._requests, *query.shape[1:])
        ones = Few((), 1, slice(0, self._requests), table, ends, None, {})
        self.attend(layer, role, ones, q, pages, q.clone(), **how)
        self.begin()

    def _room(self, layer: int, few: Few, found: Tensor) -> Tensor:
        """Where what is chosen for these requests is put, (n, U, C): in slots for one new token."""
        n, (_, choices, width) = len(few.ends), found.shape
        if few.q_len > 1:
            return found.new_empty(n, choices, width)
        if layer not in self._slots:
            self._slots[layer] = found.new_full((self._requests, choices, self._most), PAD)
        return self._slots[layer][:n, :, :width]

    def _scored(self, k_len: int, heads: int, kv_heads: int) -> int:
        """Of how many requests a filter layer may have the scores of so many keys at a time.

        The kernel has one for each query head and sums for each KV head, and a choice has copies of those.
        """
        return max(1, _SCORES // (4 * k_len * (heads + 4 * kv_heads)))
