"""Layers that keep of each prompt what its last queries attend to (SnapKV, section 4), and all that is generated.

A page has slots for every KV head, so the first rows of a request may hold other tokens in each. What is kept goes
there when the last chunk of the prompt is computed. What is generated stays in the rows that vLLM gives it, from the
prompt's end on. Rows between are read no more, and vLLM gets their pages back (runtime.vllm.specs).

Shapes: H query heads, G KV heads of this process, L tokens of a prompt, W queries that vote, D head dim, n requests.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import artifacts
from kernels.decode import MAX_QUERIES
from kernels.index import PAD
from runtime.caches.snapkv import elect, left_of, votes_of
from runtime.vllm.batch import Few, Piece
from runtime.vllm.step import LayerStep


class Snap:
    """A layer that keeps a part of each prompt, by KV head."""

    def __init__(self, policies: tuple[artifacts.SnapKV, ...], prompts: int = 0) -> None:
        """The policy of each KV head; how many prompts there can be of which only a part is computed."""
        self.policies = policies
        # The most queries that vote.
        self.window = max(policy.window for policy in policies)
        # By a request's first page, which no other request has: those of them that are computed, of the latest prompts.
        self._begun: dict[int, Tensor] = {}
        self._prompts = prompts

    def __str__(self) -> str:
        budgets = sorted({policy.budget for policy in self.policies})
        told = " or ".join(f"{b:.0%}" if isinstance(b, float) else f"{b} tokens" for b in budgets)
        return f"{told} of each prompt, as its last queries choose"

    def keep(self, step: LayerStep) -> None:
        """Keep a part of each prompt that ends in a step, and write the attention of what is generated.

        A generated token sees what is kept of its prompt and what was generated up to it. Prompts' attention is written
        already.
        """
        generated: list[Piece] = []
        for piece in step.batch.every:
            if piece.generated:
                generated += _cut(piece)
                continue
            q, _, pages = step.of(piece)
            if (voting := self.voting(int(pages[0, 0]), piece, q)) is not None:
                self.move(step, voting, piece)
        for few in step.batch.few(tuple(generated)):
            step.decode(few, few.kept_by(self.policies, partial(_rows, self.policies, few)))

    def voting(self, page: int, piece: Piece, q: Tensor) -> Tensor | None:
        """The prompt's last queries (1, H, at most `window`, D), None before its last chunk.

        page: the first one of the request. q: (1, H, Q, D) of the chunk.
        """
        first, begin = max(piece.prompt - self.window, 0), piece.k_len - piece.q_len
        if piece.k_len <= first:
            return None
        earlier = self._begun.pop(page, None)
        voting = q[:, :, max(first - begin, 0) :]
        if begin > first and earlier is not None:
            voting = torch.cat([earlier, voting], dim=2)
        if piece.k_len == piece.prompt:
            return voting
        self._begun[page] = voting.clone()
        if len(self._begun) > self._prompts:
            # Of requests that were given up.
            del self._begun[next(iter(self._begun))]
        return None

    def move(self, step: LayerStep, q: Tensor, piece: Piece) -> None:
        """Move what a prompt's last queries (1, H, W, D) elect to the first rows of its pages, head by head."""
        prompt = piece.prompt
        heads_of: dict[artifacts.SnapKV, list[int]] = {}
        for head, policy in enumerate(self.policies):
            heads_of.setdefault(policy, []).append(head)
        left = {policy: left_of(policy, prompt, prompt) for policy in heads_of}
        if all(count == prompt for count in left.values()):
            return
        held, pages = step.pages, step.batch.pages(piece, step.pages.size)
        size, table = held.size, pages.long()
        k, v = (gathered(cache, pages, prompt) for cache in (held.k, held.v))
        queries, how = q.unflatten(1, (len(self.policies), -1)), {name: step.how[name] for name in ("scale", "softcap")}
        for policy, numbers in heads_of.items():
            if (count := left[policy]) == prompt:
                continue
            heads = torch.tensor(numbers, device=q.device)
            voting = queries[:, heads].flatten(1, 2)[:, :, -policy.window :]
            votes = votes_of(policy, voting, k[:, heads].to(q.dtype), v[:, heads].to(q.dtype), **how)
            rows = elect(votes, count, policy.window)[0]
            to = torch.arange(count, device=q.device)
            for cache, whole in ((held.k, k), (held.v, v)):
                cache[table[to // size], to % size, heads[:, None]] = whole[0, heads[:, None], rows]


def gathered(cache: Tensor, pages: Tensor, k_len: int) -> Tensor:
    """The keys or values (1, G, K, D) of a sequence out of (P, S, G, D), by its pages (N,): a copy of whole pages."""
    found = cache.transpose(1, 2).index_select(0, pages).transpose(0, 1)
    return found.reshape(1, cache.shape[2], -1, cache.shape[3])[:, :, :k_len]


def _cut(piece: Piece) -> list[Piece]:
    """As many tokens at a time as one call takes; more than that are computed again after a preemption."""
    start, found = piece.k_len - piece.q_len, []
    for begin in range(0, piece.q_len, MAX_QUERIES):
        end = min(begin + MAX_QUERIES, piece.q_len)
        found.append(piece._replace(q_start=piece.q_start + begin, q_len=end - begin, k_len=start + end))
    return found


def _rows(policies: tuple[artifacts.SnapKV, ...], few: Few) -> Tensor:
    """The rows (n, C) that are read, or (n, G, C) where heads keep different numbers: the kept, then the generated."""
    policies = policies if len(set(policies)) > 1 else policies[:1]
    lengths = [(piece.prompt, piece.k_len) for piece in few.pieces]
    left = torch.tensor([[left_of(policy, n, n) for policy in policies] for n, _ in lengths])[..., None]
    prompts, ends = torch.tensor(lengths)[:, :, None, None].unbind(1)
    at = torch.arange(int((left + ends - prompts).max()))
    rows = torch.where(at < left, at, prompts - left + at)
    rows = torch.where(rows < ends, rows, PAD).to(torch.int32)
    return (rows if len(policies) > 1 else rows[:, 0].contiguous()).to(few.table.device, non_blocking=True)
