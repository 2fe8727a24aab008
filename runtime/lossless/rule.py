"""Which drafted tokens stand: those that dense attention would have written itself.

Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1): what comes out has the distribution of the
verifying scores, whatever drafted. Shapes: N drafted tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def standing(drafted: Tensor, drafts: Tensor | None, scores: Tensor) -> Tensor:
    """The drafted tokens that stand, and one more by the verifying scores: (n + 1,) int64 of n <= N that stand.

    Args:
        drafted: (N,) tokens; the i-th was drawn from softmax(drafts[i]).
        drafts: (N, V) scores that they were drawn by, after every processor; None where decoding is greedy.
        scores: (N + 1, V) those of dense attention, after every processor: row i follows i drafted tokens.
    """
    if drafts is None:
        best = scores.argmax(-1)
        return best[: _leading(best[:-1] == drafted) + 1]
    q, p = drafts.softmax(-1), scores.softmax(-1)
    at = torch.arange(len(drafted), device=drafted.device)
    count = _leading(torch.rand(len(drafted), device=p.device) * q[at, drafted] < p[at, drafted])
    last = p[count]
    if count < len(drafted):
        # What the draft gave too much of was refused; what it gave too little of is left.
        rest = (last - q[count]).clamp_(min=0)
        last = rest if rest.sum() > 0 else last
    return torch.cat([drafted[:count], torch.multinomial(last, 1)])


def _leading(right: Tensor) -> int:
    """How many come before the first that is wrong."""
    return int(right.long().cumprod(0).sum())
