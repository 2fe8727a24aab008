"""SnapKV layers of the vLLM plugin, step by step and without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import artifacts
from runtime.attention.chunk import Chunk
from runtime.caches.paging import Paging
from runtime.caches.snapkv import SnapKV
from runtime.vllm import policy_host
from runtime.vllm.policy_host import PagedPolicy
from tests.runtime.vllm.conftest import (
    CLOSE,
    EIGHT,
    LAYER,
    PAGE,
    D,
    G,
    H,
    by_selection,
    common_of,
    poisoned,
    profile,
    put,
    slots_of,
    weights_of,
)


class Sequence:
    """Request with its total tokens, pages and progress."""

    def __init__(self, prompt: int, total: int, pages: Tensor) -> None:
        self.prompt, self.pages, self.at = prompt, pages, 0
        self.q = torch.randn(total, H, D)
        self.k, self.v = torch.randn(2, total, G, D)

    def retained(self, snap: PagedPolicy) -> Tensor:
        """Return the mask (G, L) of prompt tokens that each KV head retains, in plain torch and
        fp32."""
        n, seen = self.prompt, torch.ones(G, self.prompt, dtype=torch.bool)
        for head, paging in enumerate(snap.pagings):
            count, window = paging.front_tokens(n), paging.queries
            if count == n:
                continue
            weights = weights_of(self.q[n - window : n], self.k[:n]).unflatten(0, (G, -1))[head]
            votes = weights.sum((0, 1))[: n - window]
            padded = torch.nn.functional.pad(votes, (paging.record.pool // 2,) * 2)
            means = padded.unfold(0, paging.record.pool, 1).mean(-1)
            seen[head] = False
            seen[head, means.topk(count - window).indices] = True
            seen[head, n - window :] = True
        return seen

    def expected(self, snap: PagedPolicy) -> Tensor:
        """Return the attention (T, H, D) of every token.

        Prompt tokens see all earlier tokens; generated tokens see the retained and generated ones.
        """
        n = self.prompt
        whole = by_selection((self.q[:n], self.k[:n], self.v[:n]))
        if n == len(self.k):
            return whole
        new = torch.ones(G, len(self.k) - n, dtype=torch.bool)
        seen = torch.cat([self.retained(snap), new], dim=1)
        return torch.cat([whole, by_selection((self.q[n:], self.k, self.v), seen)])


def step(
    engine: Any, cache: Tensor, snap: PagedPolicy, parts: list[tuple[Sequence, int]]
) -> list[Tensor]:
    """Compute n tokens of each (sequence, n), poison freed pages, and return the outputs."""
    q_lens = [n for _, n in parts]
    spans = [slice(s.at, s.at + n) for s, n in parts]
    for (s, _), at in zip(parts, spans, strict=True):
        slots = slots_of(s.pages, torch.arange(at.start, at.stop))
        s.k[at], s.v[at] = put(engine, cache, s.k[at], s.v[at], slots)
    query, key, value = (
        torch.cat([getattr(s, name)[at] for (s, _), at in zip(parts, spans, strict=True)])
        for name in "qkv"
    )
    common = common_of(
        q_lens,
        [at.stop for at in spans],
        torch.stack([s.pages for s, _ in parts]),
        is_prefilling=torch.tensor([s.at < s.prompt for s, _ in parts]),
        rswa_prefix_lens=torch.tensor([s.prompt for s, _ in parts], dtype=torch.int32),
    )
    output = torch.full_like(query, float("nan"))
    engine.impl.forward(LAYER, query, key, value, cache, engine.builder.build(0, common), output)
    for s, n in parts:
        s.at += n
        if s.at >= s.prompt:
            first = -(-max(paging.front_tokens(s.prompt) for paging in snap.pagings) // PAGE)
            gone = s.pages[first : max(first, s.prompt // PAGE)].long()
            cache[gone] = poisoned(engine, len(gone))
    return list(output.split(q_lens))


def paging(budget: int | float, window: int, pool: int) -> Paging:
    return SnapKV.paging(artifacts.SnapKV(budget=budget, window=window, pool=pool))


A = paging(40, window=8, pool=5)
B = paging(0.4, window=20, pool=1)
CUTS = {
    "whole": [[200] + [1] * 40],
    "chunks": [[90, 70, 40] + [1] * 20],
    "a window over chunks": [[100, 94, 3, 1, 2, 1]],
    "drafts": [[200, 4, 1, 3, 16, 1]],
    "computed again, in one with the prompt": [[170, 70]],
    "mixed": [[200] + [1] * 9, [3, 1, 1], [15, 1, 30, 1], [64] + [1] * 5, [50, 14, 1]],
}


@pytest.mark.parametrize(
    ("cuts", "pagings", "stored"),
    [*((cuts, (A, B), None) for cuts in CUTS), ("mixed", (A, A), None), ("mixed", (B, B), EIGHT)],
)
def test_snapkv_retained_tokens_and_outputs_match_reference(engine, pagings, cuts):
    snap = PagedPolicy(pagings, prompts=8)
    engine.serve_by(policy=snap, plan=None)
    left = [list(cut) for cut in CUTS[cuts]]
    prompts = [200] if len(left) == 1 else [200, 3, 45, 64, 64]
    width = -(-300 // PAGE)
    pages = torch.randperm(width * len(left)).to(torch.int32).view(len(left), width)
    cache = poisoned(engine, width * len(left))
    sequences = [
        Sequence(p, sum(cut), row) for p, cut, row in zip(prompts, left, pages, strict=True)
    ]
    actual: list[list[Tensor]] = [[] for _ in left]
    while any(left):
        parts = [(i, cut.pop(0)) for i, cut in enumerate(left) if cut]
        outputs = step(engine, cache, snap, [(sequences[i], n) for i, n in parts])
        for (i, _), out in zip(parts, outputs, strict=True):
            actual[i].append(out)
    for sequence, outs in zip(sequences, actual, strict=True):
        torch.testing.assert_close(torch.cat(outs), sequence.expected(snap), **CLOSE)


def test_snapkv_windows_of_aborted_requests_are_freed():
    snap = PagedPolicy((paging(1024, window=16, pool=7),), prompts=2)
    q = torch.randn(1, H, 20, D)
    for page in range(5):
        assert snap.last_queries(page, Chunk(0, 0, 20, 0, 20, 30), q) is None
    # Only the last two pages still have their windows.
    last = Chunk(0, 0, 10, 0, 30, 30)
    voting = [snap.last_queries(page, last, q[:, :, :10]) for page in (0, 3, 4)]
    assert [part.shape[2] for part in voting if part is not None] == [10, 16, 16]
    # The next request of a page starts from scratch.
    assert snap.last_queries(4, Chunk(0, 0, 20, 0, 20, 30), q) is None
    again = snap.last_queries(4, Chunk(0, 0, 12, 0, 12, 12), q[:, :, :12])
    assert again is not None and torch.equal(again, q[:, :, :12])


@pytest.mark.usefixtures("silent_parent")
def test_profiling_run_moves_longest_prompt(engine, monkeypatch):
    copied: list[torch.Size] = []
    gathered = policy_host.gathered

    def record(*args):
        rows = gathered(*args)
        copied.append(rows.shape)
        return rows

    monkeypatch.setattr(policy_host, "gathered", record)
    engine.serve_by(policy=PagedPolicy((A, B)), plan=None)
    profile(engine, *torch.randn(2, 10, H, D))
    assert copied == [(1, G, engine.at_work.longest, D)] * 2
