"""Layers that keep of each prompt what its last queries attend to (SnapKV, section 4).

A page has slots for every KV head, so the first rows of a request may hold other tokens in each.
What is kept goes there when the last chunk of the prompt is computed. What is generated stays in
the rows that vLLM gives it, from the prompt's end on. Rows between are read no more, and vLLM gets
their pages back (runtime.vllm.specs).

Shapes: P pages of the cache, S tokens of a page, N pages of a prompt, L tokens of it; H query heads
and G KV heads of this process, W queries that vote, D head dim; n requests of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

import artifacts
from kernels.index import PAD
from runtime.caches.snapkv import elect, left_of, votes_of
from runtime.vllm.batch import Chunk, Group
from runtime.vllm.step import LayerStep


class Snap:
    """A layer that keeps a part of each prompt, by KV head, and all that is generated."""

    why_dense: str | None = None

    def __init__(
        self,
        policies: tuple[artifacts.SnapKV, ...],
        heads: slice = slice(None),
        prompts: int = 0,
    ) -> None:
        """Policies of the model's KV heads.

        Args:
            policies: one for each KV head.
            heads: the KV heads of this process.
            prompts: how many prompts there can be of which only a part is computed.
        """
        self.every = policies
        self.policies = policies[heads]
        # The most queries that vote.
        self.window = max(policy.window for policy in self.policies)
        self._prompts = prompts
        # Votes so far of prompts that are computed in part, the latest last, by the request's first
        # page, which no other request has.
        self._begun: dict[int, Tensor] = {}

    def __str__(self) -> str:
        budgets = sorted({policy.budget for policy in self.every})
        text = " or ".join(f"{b:.0%}" if isinstance(b, float) else f"{b} tokens" for b in budgets)
        return f"{text} of each prompt, as its last queries choose"

    def keep(self, step: LayerStep) -> None:
        """Keep a part of each prompt that ends in a step, and write attention of what is generated.

        A generated token sees what is kept of its prompt and what was generated up to it. Prompts'
        attention is written already.
        """
        for chunk in step.batch.requests:
            if chunk.generated:
                continue
            query, _, table = step.of(chunk)
            voting = self.voting(int(table[0, 0]), chunk, query)
            if voting is not None:
                self.move(step, voting, chunk)
        for group in step.batch.generated:
            if self.policies not in group.kept:
                group.kept[self.policies] = self._rows(group)
            step.decode(group, group.kept[self.policies])

    def voting(self, page: int, chunk: Chunk, query: Tensor) -> Tensor | None:
        """The prompt's last queries (1, H, at most `window`, D), None before its last chunk.

        page: the first one of the request. query: (1, H, Q, D) of the chunk.
        """
        first = max(chunk.prompt - self.window, 0)
        begin = chunk.k_len - chunk.q_len
        if chunk.k_len <= first:
            return None
        earlier = self._begun.pop(page, None)
        voting = query[:, :, max(first - begin, 0) :]
        if begin > first and earlier is not None:
            voting = torch.cat([earlier, voting], dim=2)
        if chunk.k_len == chunk.prompt:
            return voting
        self._begun[page] = voting.clone()
        if len(self._begun) > self._prompts:
            # Of requests that were given up.
            del self._begun[next(iter(self._begun))]
        return None

    def move(self, step: LayerStep, query: Tensor, chunk: Chunk) -> None:
        """Move what a prompt's last queries (1, H, W, D) elect to the first rows of its pages."""
        prompt = chunk.prompt
        heads_of: dict[artifacts.SnapKV, list[int]] = {}
        for head, policy in enumerate(self.policies):
            if left_of(policy, prompt, prompt) < prompt:
                heads_of.setdefault(policy, []).append(head)
        if not heads_of:
            return
        size = step.size
        pages = step.batch.pages(chunk, size).long()
        k = gathered(step.k, pages, prompt)
        v = gathered(step.v, pages, prompt)
        queries = query.unflatten(1, (len(self.policies), -1))
        options = {name: step.options[name] for name in ("scale", "softcap")}
        for policy, numbers in heads_of.items():
            count = left_of(policy, prompt, prompt)
            heads = torch.tensor(numbers, device=query.device)
            voting = queries[:, heads].flatten(1, 2)[:, :, -policy.window :]
            keys = k[:, heads].to(query.dtype)
            votes = votes_of(policy, voting, keys, v[:, heads].to(query.dtype), **options)
            rows = elect(votes, count, policy.window)[0]
            to = torch.arange(count, device=query.device)
            slots = pages[to // size], to % size, heads[:, None]
            step.k[slots] = k[0, heads[:, None], rows]
            step.v[slots] = v[0, heads[:, None], rows]

    def _rows(self, group: Group) -> Tensor:
        """The rows that are read: those kept of the prompt, then those generated.

        (n, C), or (n, G, C) where heads keep different numbers.
        """
        policies = self.policies if len(set(self.policies)) > 1 else self.policies[:1]
        lengths = torch.tensor([(chunk.prompt, chunk.k_len) for chunk in group.chunks])
        prompts, ends = lengths[:, :, None, None].unbind(1)
        kept = [[left_of(each, c.prompt, c.prompt) for each in policies] for c in group.chunks]
        left = torch.tensor(kept)[..., None]
        rows = torch.arange(int((left + ends - prompts).max()))
        rows = torch.where(rows < left, rows, prompts - left + rows)
        rows = torch.where(rows < ends, rows, PAD).to(torch.int32)
        if len(policies) == 1:
            rows = rows[:, 0].contiguous()
        return rows.to(group.table.device, non_blocking=True)


def gathered(cache: Tensor, pages: Tensor, k_len: int) -> Tensor:
    """Keys or values (1, G, K, D) of a prompt out of (P, S, G, D), by its pages (N,): a copy."""
    copy = cache.transpose(1, 2).index_select(0, pages).transpose(0, 1)
    return copy.reshape(1, cache.shape[2], -1, cache.shape[3])[:, :, :k_len]
