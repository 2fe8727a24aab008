"""Host of cache policies in vLLM: attention of layers that drop tokens, and the pages they free.

A policy says by Policy.paged, in data, where pages hold what it keeps. Pages of dropped tokens
return to vLLM's pool, through the specifications of runtime.vllm.specs.

Shapes: P pages of the cache, S tokens of a page, N pages of a request; H query heads and G KV heads
of this process, Q new tokens of a request, D head dim; n requests of a group, L tokens of a prompt,
s first tokens, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import artifacts
from kernels.index import PAD
from runtime.attention.chunk import Chunk
from runtime.caches.make import POLICIES
from runtime.caches.pages import Paging
from runtime.caches.step import Sinks
from runtime.vllm.batch import Group
from runtime.vllm.step import LayerStep


class PagedPolicy:
    """Policies of one layer, which drops tokens, at work in vLLM.

    With a window all KV heads keep the same first and last tokens, by text positions. With a vote a
    part of each prompt and all that is generated is kept. A page has slots for every KV head, so
    the first rows of a request may hold different tokens in each. The selected tokens move there
    when the last chunk of the prompt is computed. Generated tokens stay in the rows that vLLM
    assigned, from the prompt's end on. Rows between are no longer read.

    Attributes:
        every: the paging of all KV heads of the model.
        paging: of those that are in this process.
        votes: True if a vote selects; `attend` then needs the lengths of prompts.
        window: the last tokens that are kept, or with a vote the most queries that select.
    """

    def __init__(
        self, every: tuple[Paging, ...], heads: slice = slice(None), prompts: int = 0
    ) -> None:
        """Host the paging of all KV heads, of which `heads` are here, for `prompts` requests."""
        self.every = every
        self.paging = every[heads]
        self.votes = every[0].vote is not None
        self.window = max(
            (paging.window or 0) if paging.vote is None else paging.vote.window
            for paging in self.paging
        )
        # Queries so far of prompts that are computed in part, the latest last, by the request's
        # first page, which no other request has. In the host's memory: vLLM's cache has the
        # device's.
        self._begun: dict[int, Tensor] = {}
        self._prompts = prompts

    @property
    def why_dense(self) -> str | None:
        """Reason why no prefill uses patterns, None if patterns may serve."""
        return None if self.votes else "it keeps its first and last tokens, by kv_cache"

    def __str__(self) -> str:
        """Kept tokens in words."""
        if not self.votes:
            return f"{self.paging[0].front} first and {self.window} last tokens"
        budgets = sorted({each.front for each in self.every})
        text = " or ".join(f"{b:.0%}" if isinstance(b, float) else f"{b} tokens" for b in budgets)
        return f"{text} of each prompt, as its last queries choose"

    def spec(self, full: Any) -> Any:
        """KVCacheSpec of the layer, from that of a layer which keeps every token."""
        from runtime.vllm.specs import PromptSpec, StreamingSpec, shape_of

        # vLLM's scheduler tells windows from other layers by the class of the specification.
        if self.votes:
            return PromptSpec(heads=tuple(sorted(set(self.every), key=repr)), **shape_of(full))
        sinks = int(self.paging[0].front)
        return StreamingSpec(sliding_window=self.window, sinks=sinks, **shape_of(full))

    def attend(self, step: LayerStep, served: Sequence[Chunk]) -> None:
        """Write attention of all requests but those already served, and drop tokens."""
        if self.votes:
            step.attend(served)
            for chunk in step.batch.requests:
                if not chunk.generated:
                    self._keep_prompt(step, chunk)
            groups: Sequence[Group] = step.batch.generated
            chunks: Sequence[Chunk] = ()
        else:
            # Neither patterns nor a decode section serve such a layer. Drafts of one request see
            # different tokens.
            groups, chunks = step.batch.rest(limit=1)
        for group in groups:
            if self.paging not in group.rows_read:
                group.rows_read[self.paging] = self._rows(group)
            step.decode(group, group.rows_read[self.paging])
        for chunk in chunks:
            _, output, _ = step.request(chunk)
            output.copy_(self._in_window(step, chunk))
            step.rescale(output)

    def profile_memory(self, step: LayerStep, chunk: Chunk) -> None:
        """Use the memory, beyond the output, that the last chunk of the longest prompt takes."""
        if not self.votes:
            # Both parts of the softmax in fp32.
            self._in_window(step, chunk)
            return
        # Copies of the longest prompt.
        _, heads, dim = step.query.shape
        window = min(self.window, chunk.prompt)
        self.move(step, step.query.new_zeros(1, heads, window, dim), chunk)

    def _in_window(self, step: LayerStep, chunk: Chunk) -> Tensor:
        """Attention (1, H, Q, D) over the window, merged with that over the first tokens."""
        sinks = int(self.paging[0].front)
        window = self.window
        out, lse = step.dense(chunk, window=window)
        if chunk.k_len <= window or not sinks:
            return out
        query, _, table = step.request(chunk)
        first = torch.arange(sinks, device=query.device)
        slots = table[0].long()[first // step.size], first % step.size
        k = step.k[slots].transpose(0, 1)[None]
        v = step.v[slots].transpose(0, 1)[None]
        return Sinks(query, k, v, chunk.k_len - chunk.q_len, window).merge(
            out, lse, logits=step.logits
        )

    def _keep_prompt(self, step: LayerStep, chunk: Chunk) -> None:
        """Keep the part of a prompt that its last queries select, if this is its last chunk."""
        query, _, table = step.request(chunk)
        voting = self.voting(int(table[0, 0]), chunk, query)
        if voting is not None:
            self.move(step, voting, chunk)

    def voting(self, page: int, chunk: Chunk, query: Tensor) -> Tensor | None:
        """Last queries (1, H, at most `window`, D) of a prompt, None before its last chunk.

        Args:
            page: the first one of the request.
            chunk: the tokens of the request in this step.
            query: (1, H, Q, D) of the chunk.
        """
        first = max(chunk.prompt - self.window, 0)
        begin = chunk.k_len - chunk.q_len
        if chunk.k_len <= first:
            return None
        earlier = self._begun.pop(page, None)
        voting = query[:, :, max(first - begin, 0) :]
        if begin > first and earlier is not None:
            voting = torch.cat([earlier.to(voting.device), voting], dim=2)
        if chunk.k_len == chunk.prompt:
            return voting
        self._begun[page] = voting.to("cpu", copy=True)
        if len(self._begun) > self._prompts:
            # The oldest is of an aborted request.
            del self._begun[next(iter(self._begun))]
        return None

    def move(self, step: LayerStep, query: Tensor, chunk: Chunk) -> None:
        """Copy the tokens that a prompt's last queries (1, H, W, D) select to its first rows."""
        prompt = chunk.prompt
        heads_of: dict[Paging, list[int]] = {}
        for head, each in enumerate(self.paging):
            if each.left(prompt) < prompt:
                heads_of.setdefault(each, []).append(head)
        if not heads_of:
            return
        size = step.size
        pages = step.batch.pages(chunk, size).long()
        k = gathered(step.k, pages, prompt)
        v = gathered(step.v, pages, prompt)
        queries = query.unflatten(1, (len(self.paging), -1))
        # Sums of probabilities take no sinks.
        logits = replace(step.logits, sinks=None)
        for each, numbers in heads_of.items():
            assert each.vote is not None
            heads = torch.tensor(numbers, device=query.device, dtype=torch.long)
            voting = queries[:, heads].flatten(1, 2)
            keys = k[:, heads].to(query.dtype)
            values = v[:, heads].to(query.dtype)
            rows = each.vote.select(voting, keys, values, each.left(prompt), logits=logits)[0]
            to = torch.arange(rows.shape[1], device=query.device)
            slots = pages[to // size], to % size, heads[:, None]
            step.k[slots] = k[0, heads[:, None], rows]
            step.v[slots] = v[0, heads[:, None], rows]

    def _rows(self, group: Group) -> Tensor:
        """Rows that are read, those at the front first: (n, C), or (n, G, C) by head."""
        if not self.votes:
            sinks = int(self.paging[0].front)
            seen = sinks + self.window
            ends = group.ends[:, None]
            rows = torch.arange(seen, dtype=torch.int32, device=ends.device)
            rows = torch.where(rows < sinks, rows, rows + (ends - seen).clamp_min(0))
            return torch.where(rows < ends, rows, PAD)
        paging = self.paging
        if len(set(paging)) == 1:
            paging = paging[:1]
        lengths = torch.tensor(
            [(chunk.prompt, chunk.k_len) for chunk in group.chunks],
            dtype=torch.long,
            device="cpu",
        )
        prompts, text_ends = lengths[:, :, None, None].unbind(1)
        counts = [[each.left(chunk.prompt) for each in paging] for chunk in group.chunks]
        left = torch.tensor(counts, dtype=torch.long, device="cpu")[..., None]
        rows = torch.arange(int((left + text_ends - prompts).max()), device="cpu")
        rows = torch.where(rows < left, rows, prompts - left + rows)
        rows = torch.where(rows < text_ends, rows, PAD).to(torch.int32)
        if len(paging) == 1:
            rows = rows[:, 0].contiguous()
        return rows.to(group.table.device, non_blocking=True)


def gathered(cache: Tensor, pages: Tensor, k_len: int) -> Tensor:
    """Copy of keys or values (1, G, L, D) of a prompt out of (P, S, G, D), by its pages (N,)."""
    copy = cache.transpose(1, 2).index_select(0, pages).transpose(0, 1)
    return copy.reshape(1, cache.shape[2], -1, cache.shape[3])[:, :, :k_len]


def paged_policies(
    artifact: artifacts.Artifact, heads: slice = slice(None), prompts: int = 0
) -> dict[int, PagedPolicy]:
    """Layers that drop tokens, of an artifact that vLLM can serve; see PagedPolicy."""
    return {
        layer: PagedPolicy(paging, heads, prompts)
        for layer, paging in paging_of(artifact).items()
        if paging and not isinstance(paging[0], str) and paging[0].drops
    }


def paging_of(artifact: artifacts.Artifact) -> dict[int, tuple[Any, ...]]:
    """Paging, or a reason, of each KV head by the layers of a kv_cache section (Policy.paged).

    () for layers that slide.
    """
    section = artifact.kv_cache
    if section is None:
        return {}
    paged = {name: POLICIES[record.kind].paged(record) for name, record in section.policies.items()}
    by_layer = {}
    for layer in range(len(section.layers)):
        names = section.heads(layer, artifact.model.num_kv_heads) or ()
        by_layer[layer] = tuple(paged[name] for name in names)
    return by_layer
