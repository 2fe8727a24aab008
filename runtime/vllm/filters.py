"""Decode by an artifact's decode section: filter layers select tokens, other layers read them.

Requests with equally many new tokens are served together. The selections for single new tokens are
kept in slots that live as long as the engine, and neither they nor any launch depends on the length
of a context: vLLM may capture a step in a CUDA graph and replay it for other requests. Several new
tokens (drafts) are in no graph.

Shapes: H query heads and G KV heads of this process, n requests of a group, N pages of a request,
C selected tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES
from kernels.index import PAD
from runtime.attention.chunk import Chunk
from runtime.omnikv.select import Role, Selector
from runtime.vllm.batch import Batch, Group
from runtime.vllm.step import LayerStep

# Maximum bytes of a filter layer's scores at a time: more requests are served in parts.
_SCORES = 1 << 28


class FilterDecode:
    """Decode section in one process. A selection is valid for one step.

    Attributes:
        roles: roles by layer; a layer that is missing attends to every token and does not select.
    """

    def __init__(self, selector: Selector, *, requests: int, longest: int) -> None:
        """Hold no selection.

        Args:
            selector: selects the tokens.
            requests: maximum of requests in a step.
            longest: tokens of the longest sequence.
        """
        self.selector = selector
        self._requests = requests
        self._longest = longest
        self._width = min(selector.count(longest), longest)
        # (requests, C) int32 of each filter layer.
        self._slots: dict[int, Tensor] = {}
        # Tokens selected in the step, (n, C) int32, by filter layer and number of new tokens.
        self._tokens: dict[tuple[int, int], Tensor] = {}
        self.roles = {layer: role for layer, role in selector.roles.items() if role != Role()}

    @property
    def captures(self) -> bool:
        """True if a step of single tokens can be replayed for others."""
        return self.selector.group is None

    def over_budget(self, k_len: int) -> bool:
        """True for a context with more keys than the budget."""
        return k_len > self.selector.count(k_len)

    def reads(self, chunk: Chunk) -> int:
        """Tokens that a request with more keys reads in a layer that is no filter layer."""
        return max(self.selector.count(chunk.k_len), chunk.q_len)

    def groups(self, batch: Batch) -> tuple[tuple[Group, ...], list[Chunk]]:
        """Requests of a new step that are served here, and those with more keys than the budget."""
        self._tokens.clear()
        few = [chunk for chunk in batch.requests if 1 < chunk.q_len <= MAX_QUERIES]
        drafts = [chunk for chunk in few if self.over_budget(chunk.k_len)]
        single = [chunk for chunk in batch.requests if chunk.q_len == 1]
        long = [chunk for chunk in single if self.over_budget(chunk.k_len)]
        groups = batch.groups(drafts)
        if batch.captured or long:
            # All of them in one launch: a context within the budget gets every token.
            groups += batch.groups(single)
        return groups, drafts + long

    def attend(self, layer: int, group: Group, step: LayerStep) -> None:
        """Write attention of a group in a layer with a role.

        A filter layer attends to every token and selects some; other layers attend to those, and
        to every token of contexts within the budget. For single tokens nothing is read on the host.

        Raises:
            HeadwiseError: the filter layer selected no tokens in this step.
        """
        served_by = self.roles[layer].served_by
        if served_by is not None:
            if (served_by, group.q_len) not in self._tokens:
                raise HeadwiseError(f"filter layer {served_by} selected no tokens in this step")
            step.decode(group, self._tokens[served_by, group.q_len])
            return
        width = max(self._width, group.q_len)
        keys = group.pages(step.size).shape[1] * step.size
        selection = self._slots_of(layer, group, min(width, keys))
        # The kernel has a score for each query head and sums for each KV head, and the top-k copies
        # those.
        heads = step.query.shape[1] * group.q_len + 4 * step.k.shape[2]
        for rows, part in group.parts(max(1, _SCORES // (4 * keys * heads))):
            scores = step.decode(part, scores="max")
            assert scores is not None
            tokens = self.selector.select_tokens_each(scores, part.ends, width, q_len=group.q_len)
            selection[rows] = tokens
        self._tokens[layer, group.q_len] = selection

    def profile_memory(self, layer: int, step: LayerStep) -> None:
        """Use the memory of a filter layer in a step of the most requests and longest contexts.

        Drafts of one request take more scores than a single token does.

        Args:
            layer: number of the filter layer.
            step: any tokens, with one page, used for all pages of a request.
        """
        if layer not in self.roles or not self.roles[layer].is_filter:
            return
        device = step.query.device
        pages = -(-self._longest // step.size)
        for n, q_len in (self._requests, 1), (1, min(MAX_QUERIES, self._longest)):
            table = torch.zeros(n, pages, dtype=torch.int32, device=device)
            ends = torch.full((n,), q_len, dtype=torch.int32, device=device)
            query = step.query.new_zeros(n * q_len, *step.query.shape[1:])
            group = Group((), q_len, slice(0, n * q_len), table, ends, None, {})
            self.attend(layer, group, replace(step, query=query, output=query.clone()))
        self._tokens.clear()

    def _slots_of(self, layer: int, group: Group, width: int) -> Tensor:
        """Memory (n, width) for the selection of a group: lasting slots for one new token."""
        n = len(group.ends)
        if group.q_len > 1:
            return group.ends.new_empty(n, width)
        if layer not in self._slots:
            self._slots[layer] = group.ends.new_full((self._requests, self._width), PAD)
        return self._slots[layer][:n, :width]
