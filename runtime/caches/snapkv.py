"""SnapKV: the part of a prompt that its last queries attend to, and all that is generated.

SnapKV (Li et al. 2024), section 4.

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, W window, D head dim, E
value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

import artifacts
from kernels.decode import decode_attention
from runtime.caches.policy import Policy, Step, tokens


def left_of(record: artifacts.SnapKV, held: int, seen: int) -> int:
    """Tokens left of `held` after a prompt that ends at token `seen` of the text."""
    return min(held, max(tokens(record.budget, seen), record.window))


def votes_of(
    record: artifacts.SnapKV,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None,
    backend: str = "auto",
) -> Tensor:
    """Attention of the window's queries to each earlier key, averaged over neighbours.

    q (B, H, W, D), k (B, G, n, D), v (B, G, n, E) -> (B, G, n - W). The ends are padded with zeros;
    the window's own keys are no neighbors.
    """
    result = decode_attention(q, k, v, scale=scale, softcap=softcap, scores="sum", backend=backend)
    assert result.scores is not None
    scores = result.scores[:, :, : k.shape[2] - record.window]
    return torch.nn.functional.avg_pool1d(scores, record.pool, stride=1, padding=record.pool // 2)


def elect(votes: Tensor, count: int, window: int) -> Tensor:
    """Rows (B, G, count), ascending: those with most votes (B, G, n - W), and the window's own."""
    earlier = votes.shape[2]
    best = votes.topk(count - window, dim=2).indices.sort(dim=2).values
    own = torch.arange(earlier, earlier + window, device=votes.device)
    return torch.cat([best, own.expand(*best.shape[:2], -1)], dim=2)


class SnapKV(Policy):
    """Tokens elected by a prompt's last `window` queries, those queries' own, and all generated.

    A call of at least `window` tokens, more than one, is a prompt or a chunk of one; a shorter one
    is generated text and is kept. After a prompt, `budget` tokens are selected from it and from all
    tokens cached before it, replies too. A budget that is a fraction is of all tokens so far: in a
    conversation the whole text is the prompt.
    """

    record: artifacts.SnapKV

    @classmethod
    def why_not_in_vllm(cls, record: artifacts.SnapKV) -> str | None:
        """See Policy.why_not_in_vllm."""
        return None

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        first = max(self.kept) == 0
        keys, values = self._add(keys=call.k, values=call.v)
        if call.length == 1:
            return call.attend(call.q, keys, values, ends=self._ends(keys.device))[0]
        if first:
            out = call.prefill(call.q, call.k, call.v)
        else:
            out = call.attend(call.q, keys, values)[0]
        held = self.kept[0]
        count = left_of(self.record, held, self.seen[0])
        if call.length >= self.record.window and count < held:
            self._keep(elect(self._votes(call), count, self.record.window))
        return out

    def _votes(self, call: Step) -> Tensor:
        """Votes (B, G, n - W) of the window's queries."""
        q = call.q[:, :, -self.record.window :]
        k = self.keys[:, :, : self.kept[0]]
        v = self.values[:, :, : self.kept[0]]
        return votes_of(self.record, q, k, v, **call.options)
