"""Host of cache policies in vLLM: attention of layers that drop tokens.

A policy describes by its Paging where vLLM's pages hold its tokens. The pages of the gap return to
vLLM's pool, through the specification of runtime.vllm.specs.

Shapes: P pages of the cache, S tokens of a page, N pages of a request; H query heads and G KV heads
of this process, Q new tokens of a request, D head dim; n requests of a group, L tokens of a prompt,
C rows that are read, W queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import artifacts
from kernels.index import PAD
from runtime.attention.chunk import Chunk
from runtime.caches.make import POLICIES
from runtime.caches.paging import Paging
from runtime.caches.step import Sinks
from runtime.vllm.batch import Group
from runtime.vllm.step import LayerStep


class PagedPolicy:
    """Policies of the KV heads of one layer, which drops tokens, at work in vLLM.

    Heads that select tokens of a prompt may differ: a page has slots for every KV head, so the
    first rows of a request may hold different tokens in each. Any other heads are all alike.

    Attributes:
        pagings: of the KV heads in this process.
        every: of all KV heads of the model.
        window: last tokens that are cached; None where tokens of a prompt are selected.
    """

    def __init__(
        self, pagings: tuple[Paging, ...], heads: slice = slice(None), prompts: int = 0
    ) -> None:
        """Take the pagings of all KV heads of the model.

        Args:
            pagings: one for each head.
            heads: those in this process.
            prompts: the most requests at a time.
        """
        self.every = frozenset(pagings)
        self.pagings = pagings[heads]
        self.window = pagings[0].window
        # One where the heads are alike.
        self._distinct = self.pagings if len(set(self.pagings)) > 1 else self.pagings[:1]
        self._queries = max(paging.queries for paging in self.pagings)
        # Last queries so far of prompts that are computed in part, the latest prompt last, by the
        # request's first page, which no other request has. In the host's memory: vLLM's cache has
        # the device's.
        self._begun: dict[int, Tensor] = {}
        self._prompts = prompts

    @property
    def selects(self) -> bool:
        """True if tokens of prompts are selected: `attend` then needs the lengths of prompts."""
        return self.window is None

    @property
    def why_dense(self) -> str | None:
        """Reason why no prefill uses patterns, None if patterns may serve."""
        if self.selects:
            return None
        return "it keeps its first and last tokens, by kv_cache"

    def __str__(self) -> str:
        """Retained tokens in words."""
        fronts = sorted({paging.front for paging in self.every})
        if not self.selects:
            return f"{fronts[0]} first and {self.window} last tokens"
        text = " or ".join(f"{b:.0%}" if isinstance(b, float) else f"{b} tokens" for b in fronts)
        return f"{text} of each prompt, as its last queries choose"

    def attend(self, step: LayerStep, served: Sequence[Chunk]) -> None:
        """Write attention of all requests but those already served, and drop tokens.

        Neither patterns nor a decode section serve a layer with a window.
        """
        if self.selects:
            step.attend(served)
            self._select(step)
            groups = step.batch.generated
        else:
            # Drafts of one request see different tokens.
            groups, chunks = step.batch.rest(limit=1)
            for chunk in chunks:
                _, output, _ = step.request(chunk)
                output.copy_(self._windowed(step, chunk))
                step.rescale(output)
        for group in groups:
            if self._distinct not in group.rows_read:
                group.rows_read[self._distinct] = self._rows(group)
            step.decode(group, group.rows_read[self._distinct])

    def profile_memory(self, step: LayerStep, chunk: Chunk) -> None:
        """Use the memory, beyond the output, that the last chunk of the longest prompt takes.

        With a window both parts of the softmax in fp32, otherwise copies of the prompt.
        """
        if self.selects:
            window = min(self._queries, chunk.prompt)
            _, heads, dim = step.query.shape
            self._copy(step, step.query.new_zeros(1, heads, window, dim), chunk)
        else:
            self._windowed(step, chunk)

    def _windowed(self, step: LayerStep, chunk: Chunk) -> Tensor:
        """Attention (1, H, Q, D) over the window, merged with that over the first tokens."""
        (paging,) = self._distinct
        assert paging.window is not None
        sinks = paging.front_tokens(chunk.k_len)
        out, lse = step.dense(chunk, window=paging.window)
        if chunk.k_len <= paging.window or not sinks:
            return out
        query, _, table = step.request(chunk)
        first = torch.arange(sinks, device=query.device)
        slots = table[0].long()[first // step.size], first % step.size
        k = step.k[slots].transpose(0, 1)[None]
        v = step.v[slots].transpose(0, 1)[None]
        past = chunk.k_len - chunk.q_len
        return Sinks(query, k, v, past, paging.window).merge(out, lse, logits=step.logits)

    def _select(self, step: LayerStep) -> None:
        """Copy the selected tokens of each prompt whose last chunk is in the step."""
        for chunk in step.batch.requests:
            if chunk.generated:
                continue
            query, _, table = step.request(chunk)
            last = self.last_queries(int(table[0, 0]), chunk, query)
            if last is not None:
                self._copy(step, last, chunk)

    def last_queries(self, page: int, chunk: Chunk, query: Tensor) -> Tensor | None:
        """Last queries (1, H, at most W, D) of a prompt, None before its last chunk.

        Args:
            page: the first one of the request.
            chunk: the tokens of the request in this step.
            query: (1, H, Q, D) of the chunk.
        """
        first = max(chunk.prompt - self._queries, 0)
        begin = chunk.k_len - chunk.q_len
        if chunk.k_len <= first:
            return None
        earlier = self._begun.pop(page, None)
        last = query[:, :, max(first - begin, 0) :]
        if begin > first and earlier is not None:
            last = torch.cat([earlier.to(last.device), last], dim=2)
        if chunk.k_len == chunk.prompt:
            return last
        self._begun[page] = last.to("cpu", copy=True)
        if len(self._begun) > self._prompts:
            # The oldest is of an aborted request.
            del self._begun[next(iter(self._begun))]
        return None

    def _copy(self, step: LayerStep, query: Tensor, chunk: Chunk) -> None:
        """Copy the tokens that a prompt's last queries (1, H, W, D) select to its first rows.

        Generated tokens stay in the rows that vLLM assigned, from the prompt's end on.
        """
        prompt = chunk.prompt
        heads_of: dict[Paging, list[int]] = {}
        for head, paging in enumerate(self.pagings):
            if paging.front_tokens(prompt) < prompt:
                heads_of.setdefault(paging, []).append(head)
        if not heads_of:
            return
        size = step.size
        pages = step.batch.pages(chunk, size).long()
        k = gathered(step.k, pages, prompt)
        v = gathered(step.v, pages, prompt)
        queries = query.unflatten(1, (len(self.pagings), -1))
        # Sums of probabilities take no sinks.
        logits = replace(step.logits, sinks=None)
        for paging, numbers in heads_of.items():
            assert paging.select is not None
            heads = torch.tensor(numbers, device=query.device, dtype=torch.long)
            last = queries[:, heads].flatten(1, 2)[:, :, -paging.queries :]
            keys = k[:, heads].to(query.dtype)
            values = v[:, heads].to(query.dtype)
            count = paging.front_tokens(prompt)
            rows = paging.select(paging.record, last, keys, values, count, logits=logits)[0]
            to = torch.arange(count, device=query.device)
            slots = pages[to // size], to % size, heads[:, None]
            step.k[slots] = k[0, heads[:, None], rows]
            step.v[slots] = v[0, heads[:, None], rows]

    def _rows(self, group: Group) -> Tensor:
        """Rows that are read, all but those of the gap: (n, C), or (n, G, C) by head."""
        lengths = torch.tensor(
            [chunk.k_len for chunk in group.chunks], dtype=torch.long, device="cpu"
        )
        gaps = torch.tensor(
            [
                [paging.gap(chunk.k_len, chunk.prompt) for paging in self._distinct]
                for chunk in group.chunks
            ],
            dtype=torch.long,
            device="cpu",
        )
        begins, ends = gaps[..., None].unbind(2)
        lengths = lengths[:, None, None]
        dropped = ends - begins
        rows = torch.arange(int((lengths - dropped).max()), device="cpu")
        rows = torch.where(rows < begins, rows, rows + dropped)
        rows = torch.where(rows < lengths, rows, PAD).to(torch.int32)
        if len(self._distinct) == 1:
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
        layer: PagedPolicy(pagings, heads, prompts)
        for layer, pagings in pagings_of(artifact).items()
        if any(paging.drops for paging in pagings)
    }


def pagings_of(artifact: artifacts.Artifact) -> dict[int, tuple[Paging, ...]]:
    """Paging of each KV head, by the layers of a kv_cache section; () for layers that slide."""
    section = artifact.kv_cache
    if section is None:
        return {}
    by_name = {
        name: POLICIES[record.kind].paging(record) for name, record in section.policies.items()
    }
    return {
        layer: tuple(
            by_name[name] for name in section.heads(layer, artifact.model.num_kv_heads) or ()
        )
        for layer in range(len(section.layers))
    }
