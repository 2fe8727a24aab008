"""Host of cache policies in vLLM: attention of layers that drop tokens, and the pages they free.

A policy says by Policy.paged how pages hold what it keeps; each kind of Pages has a class here.
Pages of dropped tokens return to vLLM's pool, through the specifications of runtime.vllm.specs.

Shapes: P pages of the cache, S tokens of a page, N pages of a request; H query heads and G KV heads
of this process, Q new tokens of a request, D head dim; n requests of a group, L tokens of a prompt,
s first tokens, W window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import artifacts
from kernels.index import PAD
from runtime.attention.chunk import Chunk
from runtime.caches.make import POLICIES
from runtime.caches.pages import EndPages, PromptPages
from runtime.caches.step import Sinks
from runtime.vllm.batch import Group
from runtime.vllm.step import LayerStep


class PagedPolicy(ABC):
    """Policies of one layer, which drops tokens, at work in vLLM.

    A subclass is made of the pages of all KV heads of the model, the slice of those heads that are
    in this process, and the most requests at a time.
    """

    # Reason why no prefill uses patterns, None if patterns may serve.
    why_dense: ClassVar[str | None] = None
    # True if `attend` needs the lengths of prompts.
    asks_prompts: ClassVar[bool] = False
    # True if learned logits (attention sinks) are served.
    takes_sinks: ClassVar[bool] = True

    @abstractmethod
    def __str__(self) -> str:
        """Kept tokens in words."""

    @abstractmethod
    def attend(self, step: LayerStep, served: Sequence[Chunk]) -> None:
        """Write attention of all requests but those already served, and drop tokens."""

    @abstractmethod
    def spec(self, full: Any) -> Any:
        """KVCacheSpec of the layer, from that of a layer which keeps every token."""

    def profile_memory(self, step: LayerStep, chunk: Chunk) -> None:  # noqa: B027
        """Use the memory, beyond the output, that the last chunk of the longest prompt takes."""


class PagedEnds(PagedPolicy):
    """First tokens and a window of the last, by text positions (EndPages).

    All KV heads of a layer keep the same.
    """

    why_dense = "it keeps its first and last tokens, by kv_cache"

    def __init__(
        self,
        pages: tuple[EndPages, ...],
        heads: slice = slice(None),
        prompts: int = 0,
    ) -> None:
        self.pages = pages[0]

    def __str__(self) -> str:
        return f"{self.pages.sinks} first and {self.pages.window} last tokens"

    def attend(self, step: LayerStep, served: Sequence[Chunk]) -> None:
        """See PagedPolicy.attend; neither patterns nor a decode section serve such a layer."""
        # Drafts of one request see different tokens.
        groups, chunks = step.batch.rest(limit=1)
        for group in groups:
            if self.pages not in group.rows_read:
                group.rows_read[self.pages] = self._tokens(group)
            step.decode(group, group.rows_read[self.pages])
        for chunk in chunks:
            _, output, _ = step.of(chunk)
            output.copy_(self._chunk(step, chunk))
            step.rescale(output)

    def spec(self, full: Any) -> Any:
        """See PagedPolicy.spec."""
        from runtime.vllm.specs import StreamingSpec, shape_of

        pages = self.pages
        return StreamingSpec(sliding_window=pages.window, sinks=pages.sinks, **shape_of(full))

    def profile_memory(self, step: LayerStep, chunk: Chunk) -> None:
        """See PagedPolicy.profile_memory: both parts of the softmax in fp32."""
        self._chunk(step, chunk)

    def _chunk(self, step: LayerStep, chunk: Chunk) -> Tensor:
        """Attention (1, H, Q, D) over the window, merged with that over the first tokens."""
        sinks = self.pages.sinks
        window = self.pages.window
        out, lse = step.dense(chunk, window=window)
        if chunk.k_len <= window or not sinks:
            return out
        query, _, table = step.of(chunk)
        first = torch.arange(sinks, device=query.device)
        slots = table[0].long()[first // step.size], first % step.size
        k = step.k[slots].transpose(0, 1)[None]
        v = step.v[slots].transpose(0, 1)[None]
        return Sinks(query, k, v, chunk.k_len - chunk.q_len, window).merge(
            out, lse, logits=step.logits
        )

    def _tokens(self, group: Group) -> Tensor:
        """Tokens (n, s + W) that the last query of each request sees."""
        sinks = self.pages.sinks
        seen = sinks + self.pages.window
        ends = group.ends[:, None]
        tokens = torch.arange(seen, dtype=torch.int32, device=ends.device)
        tokens = torch.where(tokens < sinks, tokens, tokens + (ends - seen).clamp_min(0))
        return torch.where(tokens < ends, tokens, PAD)


class PagedPrompts(PagedPolicy):
    """The part of each prompt that its last queries elect, and all that is generated (PromptPages).

    A page has slots for every KV head, so the first rows of a request may hold different tokens in
    each. The elected tokens move there when the last chunk of the prompt is computed. Generated
    tokens stay in the rows that vLLM assigned, from the prompt's end on. Rows between are no longer
    read.
    """

    asks_prompts = True
    takes_sinks = False

    def __init__(
        self, pages: tuple[PromptPages, ...], heads: slice = slice(None), prompts: int = 0
    ) -> None:
        self.every = pages
        self.pages = pages[heads]
        # Maximum of voting queries.
        self.window = max(each.window for each in self.pages)
        # Votes so far of prompts that are computed in part, the latest last, by the request's first
        # page, which no other request has. In the host's memory: vLLM's cache has the device's.
        self._begun: dict[int, Tensor] = {}
        self._prompts = prompts

    def __str__(self) -> str:
        budgets = sorted({each.budget for each in self.every})
        text = " or ".join(f"{b:.0%}" if isinstance(b, float) else f"{b} tokens" for b in budgets)
        return f"{text} of each prompt, as its last queries choose"

    def attend(self, step: LayerStep, served: Sequence[Chunk]) -> None:
        """See PagedPolicy.attend; a generated token sees the kept prompt and all later tokens."""
        step.attend(served)
        for chunk in step.batch.requests:
            if chunk.generated:
                continue
            query, _, table = step.of(chunk)
            voting = self.voting(int(table[0, 0]), chunk, query)
            if voting is not None:
                self.move(step, voting, chunk)
        for group in step.batch.generated:
            if self.pages not in group.rows_read:
                group.rows_read[self.pages] = self._rows(group)
            step.decode(group, group.rows_read[self.pages])

    def spec(self, full: Any) -> Any:
        """See PagedPolicy.spec."""
        from runtime.vllm.specs import PromptSpec, shape_of

        return PromptSpec(heads=tuple(sorted(set(self.every), key=repr)), **shape_of(full))

    def profile_memory(self, step: LayerStep, chunk: Chunk) -> None:
        """See PagedPolicy.profile_memory: copies of the longest prompt."""
        window = min(self.window, chunk.prompt)
        _, heads, dim = step.query.shape
        self.move(step, step.query.new_zeros(1, heads, window, dim), chunk)

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
        """Move the tokens that a prompt's last queries (1, H, W, D) elect to its first rows."""
        prompt = chunk.prompt
        heads_of: dict[PromptPages, list[int]] = {}
        for head, each in enumerate(self.pages):
            if each.left(prompt) < prompt:
                heads_of.setdefault(each, []).append(head)
        if not heads_of:
            return
        size = step.size
        pages = step.batch.pages(chunk, size).long()
        k = gathered(step.k, pages, prompt)
        v = gathered(step.v, pages, prompt)
        queries = query.unflatten(1, (len(self.pages), -1))
        # Sums of probabilities take no sinks.
        logits = replace(step.logits, sinks=None)
        for each, numbers in heads_of.items():
            heads = torch.tensor(numbers, device=query.device, dtype=torch.long)
            voting = queries[:, heads].flatten(1, 2)
            keys = k[:, heads].to(query.dtype)
            values = v[:, heads].to(query.dtype)
            rows = each.select(voting, keys, values, logits=logits)[0]
            to = torch.arange(rows.shape[1], device=query.device)
            slots = pages[to // size], to % size, heads[:, None]
            step.k[slots] = k[0, heads[:, None], rows]
            step.v[slots] = v[0, heads[:, None], rows]

    def _rows(self, group: Group) -> Tensor:
        """Rows that are read, those kept of the prompt first: (n, C), or (n, G, C) by head."""
        pages = self.pages
        if len(set(pages)) == 1:
            pages = pages[:1]
        lengths = torch.tensor(
            [(chunk.prompt, chunk.k_len) for chunk in group.chunks],
            dtype=torch.long,
            device="cpu",
        )
        prompts, ends = lengths[:, :, None, None].unbind(1)
        counts = [[each.left(chunk.prompt) for each in pages] for chunk in group.chunks]
        left = torch.tensor(counts, dtype=torch.long, device="cpu")[..., None]
        rows = torch.arange(int((left + ends - prompts).max()), device="cpu")
        rows = torch.where(rows < left, rows, prompts - left + rows)
        rows = torch.where(rows < ends, rows, PAD).to(torch.int32)
        if len(pages) == 1:
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
    policies: dict[int, PagedPolicy] = {}
    for layer, pages in pages_of(artifact).items():
        if pages and isinstance(pages[0], EndPages):
            policies[layer] = PagedEnds(pages, heads, prompts)
        elif pages and isinstance(pages[0], PromptPages):
            policies[layer] = PagedPrompts(pages, heads, prompts)
    return policies


def pages_of(artifact: artifacts.Artifact) -> dict[int, tuple[Any, ...]]:
    """Pages, or a reason, of each KV head by the layers of a kv_cache section (Policy.paged).

    () for layers that slide.
    """
    section = artifact.kv_cache
    if section is None:
        return {}
    paged = {name: POLICIES[record.kind].paged(record) for name, record in section.policies.items()}
    pages = {}
    for layer in range(len(section.layers)):
        names = section.heads(layer, artifact.model.num_kv_heads) or ()
        pages[layer] = tuple(paged[name] for name in names)
    return pages
