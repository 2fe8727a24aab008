"""SnapKV: of a prompt what its last queries attend to, and all that is generated (Li et al. 2024,
section 4).

Shapes: B batch, H query heads, G KV heads, Q new tokens, n tokens kept, W window, D head dim, E
value dim."""

from __future__ import annotations

import torch
from torch import Tensor

import artifacts
from kernels.decode import decode_attention
from runtime.caches.policy import Policy, tokens
from runtime.caches.step import Step


def left_of(record: artifacts.SnapKV, held: int, seen: int) -> int:
    """How many of the `held` tokens are left after a prompt that ends after `seen` tokens of the
    text."""
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
    """(B, G, n - W): attention of queries (B, H, W, D) to keys (B, G, n, D), averaged over
    neighbours.

    Beyond the ends are zeros; the window's own keys are no neighbours. Values are (B, G, n, E).
    """
    done = decode_attention(q, k, v, scale=scale, softcap=softcap, scores="sum", backend=backend)
    assert done.scores is not None
    scores = done.scores[:, :, : k.shape[2] - record.window]
    return torch.nn.functional.avg_pool1d(scores, record.pool, stride=1, padding=record.pool // 2)


def elect(votes: Tensor, kept: int, window: int) -> Tensor:
    """(B, G, kept) ascending rows: those with most of the votes (B, G, n - W), and the window's
    own."""
    earlier = votes.shape[2]
    places = votes.topk(kept - window, dim=2).indices.sort(dim=2).values
    own = torch.arange(earlier, earlier + window, device=places.device).expand(
        *places.shape[:2], -1
    )
    return torch.cat([places, own], dim=2)


class SnapKV(Policy):
    """Tokens that a prompt's last `window` queries vote for, those queries' own, and every token
    generated since.

    A call of at least `window` tokens, more than one, is a prompt or a chunk of one; a shorter one
    is generated text and is kept. After a prompt whatever was kept before it, replies too, stands
    for election with it, and `budget` tokens are left, a share being of all tokens so far: in a
    conversation the prompt is all that was said."""

    by_head_in_vllm = True

    def __init__(self, record: artifacts.SnapKV) -> None:
        super().__init__()
        self.record = record

    def attend(self, call: Step) -> Tensor:
        """See Policy.attend."""
        past = self.kept
        keys, values = self._add(keys=call.k, values=call.v)
        if not past and call.length > 1:
            out = call.prefill(call.q, call.k, call.v)
        else:
            out = call.attend(call.q, keys, values)[0]
        kept = left_of(self.record, self.kept, self.seen)
        if call.length >= max(2, self.record.window) and kept < self.kept:
            self._keep(elect(self._votes(call), kept, self.record.window))
        return out

    def _votes(self, call: Step) -> Tensor:
        """(B, G, n - W), of the window's queries."""
        q = call.q[:, :, -self.record.window :]
        k = self.keys[:, :, : self.kept]
        v = self.values[:, :, : self.kept]
        return votes_of(
            self.record, q, k, v, scale=call.scale, softcap=call.softcap, backend=call.backend
        )
