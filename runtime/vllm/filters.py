"""Decode by an artifact's decode section: filter layers choose tokens, others read these alone.

Requests with equally many new tokens are served together. Tokens chosen for one new token each lie
in slots that live as long as the engine, and neither they nor any launch depends on the length of a
context: vLLM may capture a step in a CUDA graph and replay it for other requests. Several new
tokens (drafts) are in no graph.

Shapes: H query heads and G KV heads of this process, n requests of a group, N pages of a request,
C chosen tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES
from kernels.index import PAD
from runtime.omnikv.select import Role, Selector
from runtime.vllm.batch import Batch, Chunk, Group
from runtime.vllm.step import LayerStep

# Most bytes of a filter layer's scores at a time: more requests are served in parts.
_SCORES = 1 << 28


class Chooser:
    """Decode section at work in one process. A choice holds for one step."""

    def __init__(self, selector: Selector, *, requests: int, longest: int) -> None:
        """`requests`: the most in a step. `longest`: tokens of the longest sequence."""
        self.selector = selector
        self._requests = requests
        self._longest = longest
        self._most = min(selector.count(longest), longest)
        # (requests, C) int32 of each filter layer.
        self._slots: dict[int, Tensor] = {}
        # Tokens chosen in the step, (n, C) int32, by filter layer and number of new tokens.
        self._chosen: dict[tuple[int, int], Tensor] = {}
        # A layer that is missing attends to everything and does not choose.
        self.roles = {layer: role for layer, role in selector.roles.items() if role != Role()}

    @property
    def captures(self) -> bool:
        """True if a step of single tokens can be replayed for others."""
        return self.selector.group is None

    def gains(self, k_len: int) -> bool:
        """True for a context with more keys than are chosen."""
        return k_len > self.selector.count(k_len)

    def reads(self, chunk: Chunk) -> int:
        """Tokens that a request with more keys reads in a layer that does not choose."""
        return max(self.selector.count(chunk.k_len), chunk.q_len)

    def groups(self, batch: Batch) -> tuple[tuple[Group, ...], list[Chunk]]:
        """Requests of a new step that are served here, and those with more keys than are chosen."""
        self._chosen.clear()
        drafts = [c for c in batch.requests if 1 < c.q_len <= MAX_QUERIES and self.gains(c.k_len)]
        single = [chunk for chunk in batch.requests if chunk.q_len == 1]
        gaining = [chunk for chunk in single if self.gains(chunk.k_len)]
        chosen = batch.groups(drafts)
        if batch.captured or gaining:
            # All of them in one launch: a context within the budget gets every token.
            chosen += batch.groups(single)
        return chosen, drafts + gaining

    def attend(self, layer: int, group: Group, step: LayerStep) -> None:
        """Write attention of a group in a layer with a role.

        A filter layer attends to everything and chooses; others attend to the tokens chosen for
        them, of contexts within the budget to everything. For single tokens nothing is read on the
        host.

        Raises:
            HeadwiseError: the filter layer chose nothing in this step.
        """
        chooses = self.roles[layer].filter
        if chooses is not None:
            if (chooses, group.q_len) not in self._chosen:
                raise HeadwiseError(f"filter layer {chooses} has chosen nothing")
            step.decode(group, self._chosen[chooses, group.q_len])
            return
        most = max(self._most, group.q_len)
        keys = group.pages(step.size).shape[1] * step.size
        chosen = self._slots_of(layer, group, min(most, keys))
        # The kernel has a score for each query head and sums for each KV head, and a choice has
        # copies of those.
        heads = step.query.shape[1] * group.q_len + 4 * step.k.shape[2]
        for rows, part in group.parts(max(1, _SCORES // (4 * keys * heads))):
            scores = step.decode(part, scores="max")
            assert scores is not None
            tokens = self.selector.choose_each(scores, part.ends, most, q_len=group.q_len)
            chosen[rows] = tokens
        self._chosen[layer, group.q_len] = chosen

    def rehearse(self, layer: int, step: LayerStep) -> None:
        """Use the memory of a filter layer in a step of the most requests and longest contexts.

        Drafts of one request take more scores than a single token does.

        Args:
            step: any tokens, with one page that stands for all.
        """
        if layer not in self.roles or not self.roles[layer].filters:
            return
        device = step.query.device
        pages = -(-self._longest // step.size)
        for n, q_len in (self._requests, 1), (1, min(MAX_QUERIES, self._longest)):
            table = torch.zeros(n, pages, dtype=torch.int32, device=device)
            ends = torch.full((n,), q_len, dtype=torch.int32, device=device)
            query = step.query.new_zeros(n * q_len, *step.query.shape[1:])
            group = Group((), q_len, slice(0, n * q_len), table, ends, None, {})
            self.attend(layer, group, replace(step, query=query, output=query.clone()))
        self._chosen.clear()

    def _slots_of(self, layer: int, group: Group, width: int) -> Tensor:
        """Memory (n, width) for the tokens chosen for a group: lasting slots for one new token."""
        n = len(group.ends)
        if group.q_len > 1:
            return group.ends.new_empty(n, width)
        if layer not in self._slots:
            self._slots[layer] = group.ends.new_full((self._requests, self._most), PAD)
        return self._slots[layer][:n, :width]
