"""Decode by an artifact's decode section: filter layers attend to everything and choose, others read chosen tokens.

Requests with equally many new tokens are served together. What is chosen for one token each lies in slots that are
there as long as the engine, and neither they nor any launch depends on how long a context is: vLLM may capture a step
in a CUDA graph and replay it for other requests. Several new tokens (drafts) are in no graph.

Shapes: T tokens of a step, H query heads and G KV heads of this process, n requests, K keys of one, D head dim,
C tokens that are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES
from kernels.index import PAD
from runtime.omnikv.decode import OmniKV
from runtime.omnikv.roles import Role
from runtime.vllm.batch import Few, Piece, few_of
from runtime.vllm.fit import ranges
from runtime.vllm.step import LayerStep

# Bytes of scores that a filter layer may have at a time: of more requests they are made in parts.
_SCORES = 1 << 28


class Chooser:
    """The decode section at work in one process. What is chosen holds for one step, by filter layer."""

    def __init__(self, omni: OmniKV, *, requests: int, longest: int) -> None:
        """requests: the most in a step. longest: tokens of the longest sequence."""
        self.omni, self._longest = omni, longest
        self._requests, self._most = requests, min(omni.count(longest), longest)
        # (requests, slots) int32 of each filter layer.
        self._slots: dict[int, Tensor] = {}
        # By filter layer and number of new tokens: what is chosen in the step, (n, C) int32.
        self._chosen: dict[tuple[int, int], Tensor] = {}

    def __str__(self) -> str:
        return reading(self.omni.roles)

    @property
    def captures(self) -> bool:
        """Whether a step of single tokens can be replayed for others."""
        return self.omni.group is None

    def takes(self, q_len: int) -> bool:
        """Whether requests with so many new tokens, which are several, are served."""
        return 1 < q_len <= MAX_QUERIES

    def gains(self, k_len: int) -> bool:
        """Whether a context has more keys than are chosen."""
        return k_len > self.omni.count(k_len)

    def groups(self, every: Sequence[Piece], common: Any, *, captured: bool) -> tuple[tuple[Few, ...], list[Piece]]:
        """What of a new step is served, requests alike together, and those of them that have more keys than are chosen.

        common: vLLM's metadata of the step. captured: it is to be replayed for others.
        """
        self._chosen.clear()
        steps = [piece for piece in every if self.takes(piece.q_len) and self.gains(piece.k_len)]
        ones = [piece for piece in every if piece.q_len == 1]
        gaining = [piece for piece in ones if self.gains(piece.k_len)]
        chosen = few_of(steps, common.block_table_tensor)
        if captured or gaining:
            # All of them, since a launch takes them together: who is within the budget gets every token.
            chosen += few_of(ones, common.block_table_tensor, common.seq_lens, captured=captured)
        return chosen, steps + gaining

    def role(self, layer: int) -> Role | None:
        """What a layer does, None where that is to attend to everything and no more."""
        role = self.omni.roles.get(layer)
        return role if role is not None and (role.filters or role.filter is not None) else None

    def attend(self, layer: int, role: Role, few: Few, step: LayerStep) -> None:
        """Write attention of these requests in a layer that has this role.

        A filter layer attends to everything and chooses; others attend to what was chosen for them, of contexts within
        the budget to everything. Of requests with one new token nothing is read on the host.

        Raises:
            HeadwiseError: the filter layer chose nothing in this step.
        """
        if role.filter is not None:
            if (role.filter, few.q_len) not in self._chosen:
                raise HeadwiseError(f"filter layer {role.filter} has chosen nothing")
            step.decode(few, self._chosen[role.filter, few.q_len])
            return
        chosen, most = None, max(self._most, few.q_len)
        keys = few.pages(step.pages.size).shape[1] * step.pages.size
        # The kernel has a score for each query head and sums for each KV head, and a choice has copies of those.
        heads = step.query.shape[1] * few.q_len + 4 * step.pages.k.shape[2]
        for some, part in few.parts(max(1, _SCORES // (4 * keys * heads))):
            scores = step.decode(part, scores="max")
            assert scores is not None
            found = self.omni.choose_each(layer, scores, part.ends, most, q_len=few.q_len)
            chosen = self._room(layer, few, found) if chosen is None else chosen
            chosen[some] = found
        assert chosen is not None
        self._chosen[layer, few.q_len] = chosen

    def rehearse(self, layer: int, role: Role, step: LayerStep) -> None:
        """Take what a filter layer takes in a step of the most requests with the longest contexts, and keep the slots.

        step: of any tokens, with one page, which stands for all.
        """
        n, device = self._requests, step.query.device
        table = torch.zeros(n, -(-self._longest // step.pages.size), dtype=torch.int32, device=device)
        q = step.query.new_zeros(n, *step.query.shape[1:])
        ones = Few((), 1, slice(0, n), table, torch.ones(n, dtype=torch.int32, device=device), None, {})
        self.attend(layer, role, ones, step._replace(query=q, output=q.clone()))
        self._chosen.clear()

    def _room(self, layer: int, few: Few, found: Tensor) -> Tensor:
        """Where what is chosen for these requests is put, (n, C): in slots for one new token."""
        n, width = len(few.ends), found.shape[-1]
        if few.q_len > 1:
            return found.new_empty(n, width)
        if layer not in self._slots:
            self._slots[layer] = found.new_full((self._requests, self._most), PAD)
        return self._slots[layer][:n, :width]


def reading(roles: Mapping[int, Role]) -> str:
    """Which layers read what which ones choose."""
    filters = ranges(layer for layer, role in roles.items() if role.filters)
    served = ranges(layer for layer, role in roles.items() if role.filter is not None)
    return f"layers {served} read what layers {filters} choose"
