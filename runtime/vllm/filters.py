"""Decode by an artifact's decode section: filter layers choose tokens, others read these alone.

Requests with equally many new tokens are served together. What is chosen for one token each lies in
slots that are there as long as the engine, and neither they nor any launch depends on how long a
context is: vLLM may capture a step in a CUDA graph and replay it for other requests. Several new
tokens (drafts) are in no graph.

Shapes: H query heads and G KV heads of this process, n requests of a group, N pages of a request,
C tokens that are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES
from kernels.index import PAD
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.select import Role
from runtime.vllm.batch import Chunk, Group, groups_of
from runtime.vllm.step import LayerStep

# Bytes of scores that a filter layer may have at a time: of more requests they are made in parts.
_SCORES = 1 << 28


class Chooser:
    """The decode section at work in one process. What is chosen holds for one step."""

    def __init__(self, omni: OmniKV, *, requests: int, longest: int) -> None:
        """requests: the most in a step. longest: tokens of the longest sequence."""
        self.omni = omni
        self._requests = requests
        self._longest = longest
        self._most = min(omni.count(longest), longest)
        # (requests, C) int32 of each filter layer.
        self._slots: dict[int, Tensor] = {}
        # By filter layer and number of new tokens: what is chosen in the step, (n, C) int32.
        self._chosen: dict[tuple[int, int], Tensor] = {}

    @property
    def captures(self) -> bool:
        """True where a step of single tokens can be replayed for others."""
        return self.omni.group is None

    def gains(self, k_len: int) -> bool:
        """True for a context with more keys than are chosen."""
        return k_len > self.omni.count(k_len)

    def groups(
        self, requests: Sequence[Chunk], common: Any, *, captured: bool
    ) -> tuple[tuple[Group, ...], list[Chunk]]:
        """The requests of a new step that are served, and those with more keys than are chosen.

        common: vLLM's metadata of the step. captured: it is to be replayed for others.
        """
        self._chosen.clear()
        table = common.block_table_tensor
        drafts = [c for c in requests if 1 < c.q_len <= MAX_QUERIES and self.gains(c.k_len)]
        single = [chunk for chunk in requests if chunk.q_len == 1]
        gaining = [chunk for chunk in single if self.gains(chunk.k_len)]
        chosen = groups_of(drafts, table)
        if captured or gaining:
            # All of them in one launch: a context within the budget gets every token.
            chosen += groups_of(single, table, common.seq_lens, captured=captured)
        return chosen, drafts + gaining

    def role(self, layer: int) -> Role | None:
        """What a layer does, None where that is to attend to everything and no more."""
        role = self.omni.roles.get(layer)
        return role if role is not None and (role.filters or role.filter is not None) else None

    def attend(self, layer: int, role: Role, group: Group, step: LayerStep) -> None:
        """Write attention of a group in a layer that has this role.

        A filter layer attends to everything and chooses; others attend to what was chosen for them,
        of contexts within the budget to everything. Of single tokens nothing is read on the host.

        Raises:
            HeadwiseError: the filter layer chose nothing in this step.
        """
        if role.filter is not None:
            if (role.filter, group.q_len) not in self._chosen:
                raise HeadwiseError(f"filter layer {role.filter} has chosen nothing")
            step.decode(group, self._chosen[role.filter, group.q_len])
            return
        most = max(self._most, group.q_len)
        keys = group.pages(step.size).shape[1] * step.size
        chosen = self._room(layer, group, min(most, keys))
        # The kernel has a score for each query head and sums for each KV head, and a choice has
        # copies of those.
        heads = step.query.shape[1] * group.q_len + 4 * step.k.shape[2]
        for rows, part in group.parts(max(1, _SCORES // (4 * keys * heads))):
            scores = step.decode(part, scores="max")
            assert scores is not None
            tokens = self.omni.choose_each(layer, scores, part.ends, most, q_len=group.q_len)
            chosen[rows] = tokens
        self._chosen[layer, group.q_len] = chosen

    def rehearse(self, layer: int, role: Role, step: LayerStep) -> None:
        """Take the memory of a filter layer in a step of the most requests and longest contexts.

        step: of any tokens, with one page, which stands for all.
        """
        n = self._requests
        device = step.query.device
        pages = -(-self._longest // step.size)
        table = torch.zeros(n, pages, dtype=torch.int32, device=device)
        ends = torch.ones(n, dtype=torch.int32, device=device)
        query = step.query.new_zeros(n, *step.query.shape[1:])
        group = Group((), 1, slice(0, n), table, ends, None, {})
        self.attend(layer, role, group, replace(step, query=query, output=query.clone()))
        self._chosen.clear()

    def _room(self, layer: int, group: Group, width: int) -> Tensor:
        """Where what is chosen for a group is put, (n, width): in slots for one new token."""
        n = len(group.ends)
        if group.q_len > 1:
            return group.ends.new_empty(n, width)
        if layer not in self._slots:
            self._slots[layer] = group.ends.new_full((self._requests, self._most), PAD)
        return self._slots[layer][:n, :width]
