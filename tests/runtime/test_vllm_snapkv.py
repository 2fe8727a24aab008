"""Layers of the vLLM plugin that keep a part of each prompt, step by step and without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import artifacts
from runtime.caches.snapkv import left_of
from runtime.vllm.batch import Chunk, split_at_prompts
from runtime.vllm.keep import Snap
from tests.runtime.test_vllm_parts import (
    EIGHT,
    LAYER,
    PAGE,
    Common,
    D,
    G,
    H,
    Parent,
    engine,
    ours,
    poisoned,
    put,
    stored,
)

__all__ = ["engine", "ours", "stored"]


class Sequence:
    """A request: what it computes in all, its pages, and how far it is."""

    def __init__(self, prompt: int, total: int, pages: Tensor) -> None:
        self.prompt, self.pages, self.at = prompt, pages, 0
        self.q = torch.randn(total, H, D)
        self.k, self.v = torch.randn(2, total, G, D)

    def kept(self, snap: Snap) -> Tensor:
        """(G, L) which tokens of the prompt each KV head keeps, in plain torch and fp32."""
        n, seen = self.prompt, torch.ones(G, self.prompt, dtype=torch.bool)
        for head, policy in enumerate(snap.policies):
            count, window = left_of(policy, n, n), policy.window
            if count == n:
                continue
            q = self.q[n - window : n, head * (H // G) : (head + 1) * (H // G)]
            logits = torch.einsum("qhd,kd->hqk", q, self.k[:n, head]) * Parent.scale
            later = torch.arange(n) > torch.arange(n - window, n)[:, None]
            votes = logits.masked_fill(later, float("-inf")).softmax(-1).sum((0, 1))[: n - window]
            padded = torch.nn.functional.pad(votes, (policy.pool // 2,) * 2)
            means = padded.unfold(0, policy.pool, 1).mean(-1)
            seen[head] = False
            seen[head, means.topk(count - window).indices] = True
            seen[head, n - window :] = True
        return seen

    def expected(self, snap: Snap) -> Tensor:
        """Attention (T, H, D) of every token: all before it in the prompt, then what is kept and
        what was generated."""
        total = len(self.k)
        seen = torch.ones(total, total).tril().bool().expand(G, -1, -1).clone()
        seen[:, self.prompt :, : self.prompt] = self.kept(snap)[:, None]
        seen = seen.repeat_interleave(H // G, 0)
        k, v = (x.repeat_interleave(H // G, 1) for x in (self.k, self.v))
        logits = torch.einsum("qhd,khd->hqk", self.q, k) * Parent.scale
        return torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, float("-inf")).softmax(-1), v)


def step(engine: Any, cache: Tensor, snap: Snap, parts: list[tuple[Sequence, int]]) -> list[Tensor]:
    """Compute so many tokens of each sequence; what comes out. Pages that go back to vLLM are
    poisoned."""
    q_lens, ends = [n for _, n in parts], [s.at + n for s, n in parts]
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    spans = [slice(s.at, s.at + n) for s, n in parts]
    for (s, _), at in zip(parts, spans, strict=True):
        rows = torch.arange(at.start, at.stop)
        slots = s.pages[rows // PAGE].long() * PAGE + rows % PAGE
        s.k[at], s.v[at] = put(engine, cache, s.k[at], s.v[at], slots)
    query, key, value = (
        torch.cat([getattr(s, name)[at] for (s, _), at in zip(parts, spans, strict=True)])
        for name in "qkv"
    )
    common = Common(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        num_reqs=len(parts),
        num_actual_tokens=sum(q_lens),
        max_query_len=max(q_lens),
        max_seq_len=max(ends),
        block_table_tensor=torch.stack([s.pages for s, _ in parts]),
        slot_mapping=torch.zeros(sum(q_lens)),
        is_prefilling=torch.tensor([s.at < s.prompt for s, _ in parts]),
        rswa_prefix_lens=torch.tensor([s.prompt for s, _ in parts], dtype=torch.int32),
    )
    output = torch.full_like(query, float("nan"))
    engine.impl.forward(LAYER, query, key, value, cache, engine.builder.build(0, common), output)
    for s, n in parts:
        s.at += n
        if s.at >= s.prompt:
            first = -(-max(left_of(policy, s.prompt, s.prompt) for policy in snap.policies) // PAGE)
            gone = s.pages[first : max(first, s.prompt // PAGE)].long()
            cache[gone] = poisoned(engine, len(gone))
    return list(output.split(q_lens))


A, B = (
    artifacts.SnapKV(budget=40, window=8, pool=5),
    artifacts.SnapKV(budget=0.4, window=20, pool=1),
)


@pytest.mark.parametrize("stored", [None, *EIGHT])
@pytest.mark.parametrize("policies", [(A, A), (B, B), (A, B)])
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([[200] + [1] * 40], id="whole"),
        pytest.param([[90, 70, 40] + [1] * 20], id="chunks"),
        pytest.param([[100, 94, 3, 1, 2, 1]], id="a window over chunks"),
        pytest.param([[200, 4, 1, 3, 16, 1]], id="drafts"),
        pytest.param([[170, 70]], id="computed again, in one with the prompt"),
        pytest.param(
            [[200] + [1] * 9, [3, 1, 1], [15, 1, 30, 1], [64] + [1] * 5, [50, 14, 1]], id="mixed"
        ),
    ],
)
def test_what_is_kept_and_what_is_generated(
    engine: Any, policies: tuple[artifacts.SnapKV, ...], cuts: list[list[int]]
) -> None:
    snap = Snap(policies, prompts=8)
    engine.layer.update(keeps=snap, plan=None)
    engine.builder.__dict__.update(_drops=True, _splits_at_prompts=True, _gets_prompts=True)
    prompts = [200] if len(cuts) == 1 else [200, 3, 45, 64, 64]
    width = -(-300 // PAGE)
    pages = torch.randperm(width * len(cuts)).to(torch.int32).view(len(cuts), width)
    cache = poisoned(engine, width * len(cuts))
    sequences = [
        Sequence(p, sum(cut), row) for p, cut, row in zip(prompts, cuts, pages, strict=True)
    ]
    left, found = [list(cut) for cut in cuts], [[] for _ in cuts]  # type: list[list[int]], list[list[Tensor]]
    while any(left):
        parts = [(i, left[i].pop(0)) for i in range(len(cuts)) if left[i]]
        outputs = step(engine, cache, snap, [(sequences[i], n) for i, n in parts])
        for (i, _), out in zip(parts, outputs, strict=True):
            found[i].append(out)
    for sequence, outs in zip(sequences, found, strict=True):
        torch.testing.assert_close(torch.cat(outs), sequence.expected(snap), atol=2e-5, rtol=1e-5)


def test_prompts_and_what_follows_are_pieces_of_their_own() -> None:
    every = (Chunk(0, 0, 10, 10), Chunk(1, 10, 30, 50), Chunk(2, 40, 1, 21), Chunk(3, 41, 5, 40))
    found = split_at_prompts(every, [10, 35, 20, 100])
    assert found == (
        Chunk(0, 0, 10, 10, 10),
        Chunk(1, 10, 15, 35, 35),
        Chunk(1, 25, 15, 50, 35),
        Chunk(2, 40, 1, 21, 20),
        Chunk(3, 41, 5, 40, 100),
    )
    assert [piece.generated for piece in found] == [False, False, True, True, False]


def test_windows_of_requests_that_were_given_up_go() -> None:
    snap, q = Snap((artifacts.SnapKV(window=16),), prompts=2), torch.randn(1, H, 20, D)
    for page in range(5):
        assert snap.voting(page, Chunk(0, 0, 20, 20, 30), q) is None
    # Only what of the window there was is left, of the last two.
    last = Chunk(0, 0, 10, 30, 30)
    voting = [snap.voting(page, last, q[:, :, :10]) for page in (0, 3, 4)]
    assert [part.shape[2] for part in voting if part is not None] == [10, 16, 16]
    # A page's next request begins anew.
    assert snap.voting(4, Chunk(0, 0, 20, 20, 30), q) is None
    again = snap.voting(4, Chunk(0, 0, 12, 12, 12), q[:, :, :12])
    assert again is not None and torch.equal(again, q[:, :, :12])


@pytest.mark.parametrize("policies", [(A, A), (A, B)])
def test_the_profiling_run_moves_the_longest_prompt(
    engine: Any, policies: tuple[artifacts.SnapKV, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import runtime.vllm.keep as keep

    copied: list[torch.Size] = []
    gathered = keep.gathered
    monkeypatch.setattr(
        keep,
        "gathered",
        lambda *args: (copied.append((found := gathered(*args)).shape), found)[1],
    )
    monkeypatch.setattr(Parent, "forward", lambda *args: args[-1])
    engine.layer.update(keeps=Snap(policies), plan=None)
    query = torch.randn(10, H, D)
    engine.impl.forward(LAYER, query, None, None, torch.empty(0), None, torch.empty_like(query))
    assert copied == [(1, G, engine.at_work.longest, D)] * 2
