"""Layers that keep their first tokens and a window of the last (StreamingLLM, section 3.2).

Shapes: H query heads, Q new tokens of a request, D head dim, n requests of a group, s first tokens,
W window.
"""

from __future__ import annotations

import torch
from torch import Tensor

import artifacts
from kernels.index import PAD
from kernels.merging import with_few_keys
from runtime.vllm.batch import Chunk, Group
from runtime.vllm.step import LayerStep


class Stream:
    """A layer whose queries see its first tokens and a window; the pages between go back."""

    # Why no prefill goes by patterns.
    why_dense: str | None = "it keeps its first and last tokens, by kv_cache"

    def __init__(self, policy: artifacts.Streaming) -> None:
        self.policy = policy

    def __str__(self) -> str:
        return f"{self.policy.sinks} first and {self.policy.window} last tokens"

    def attend(self, step: LayerStep) -> None:
        """Write attention of all requests."""
        # Drafts of one request see different tokens.
        groups, chunks = step.batch.rest(most=1)
        for group in groups:
            if self.policy not in group.kept:
                group.kept[self.policy] = self._tokens(group)
            step.decode(group, group.kept[self.policy])
        for chunk in chunks:
            _, output, _ = step.of(chunk)
            output.copy_(self._chunk(step, chunk))
            if step.v_scale != 1:
                output *= step.v_scale

    def _chunk(self, step: LayerStep, chunk: Chunk) -> Tensor:
        """Attention (1, H, Q, D) over the window, merged with that over the first tokens.

        A learned logit of `sinks` is in the window's already.
        """
        sinks = self.policy.sinks
        window = self.policy.window
        out, lse = step.dense(chunk, window=window)
        if chunk.k_len <= window or not sinks:
            return out
        query, _, table = step.of(chunk)
        positions = torch.arange(chunk.k_len - chunk.q_len, chunk.k_len, device=query.device)
        first = torch.arange(sinks, device=query.device)
        size = step.size
        slots = table[0].long()[first // size], first % size
        k = step.k[slots].transpose(0, 1)[None]
        v = step.v[slots].transpose(0, 1)[None]
        options = {name: step.options[name] for name in ("scale", "softcap")}
        seen = first <= positions[:, None] - window
        return with_few_keys(out, lse, query, k, v, seen=seen, **options)

    def _tokens(self, group: Group) -> Tensor:
        """The tokens (n, s + W) that the last query of each request sees."""
        sinks = self.policy.sinks
        window = self.policy.window
        ends = group.ends[:, None]
        begin = (ends - window).clamp_min(0)
        first = torch.arange(sinks, dtype=torch.int32, device=ends.device)
        last = begin + torch.arange(window, dtype=torch.int32, device=ends.device)
        first = torch.where(first < begin, first, PAD)
        tokens = torch.cat([first, torch.where(last < ends, last, PAD)], dim=1)
        # Padding goes to the end: few requests are as short as that.
        return tokens.sort(dim=1).values if sinks else tokens
