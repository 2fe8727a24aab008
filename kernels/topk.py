"""Top-k of each row, by number or by mass.

Shapes: B batch, n entries of a row, W the number that is taken at most.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kernels import registry
from kernels.index import PAD

# Mass is added up in whole numbers: what fp32 adds up to depends on the order, and on a GPU the
# order on the run.
_UNITS = 2.0**40
_LOWER_HALF = 0xFFFFFFFF


@dataclass(frozen=True, eq=False, slots=True)
class TopKCall:
    """Choice of the best entries of each sequence's row of fp32 scores (B, n), for OmniKV.

    Attributes:
        scores: any numbers; -inf for what must not be taken.
        width: W, how many entries are taken at most, or n.
        ends: (B,) int32, the end of each row: entries from there on are not read; n by default.
        counts: (B,) int32, how many entries of each row are taken at most, in addition to `width`.
    """

    scores: Tensor
    width: int
    _: KW_ONLY
    ends: Tensor | None = None
    counts: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the scores."""
        return self.scores.device

    def run(self, backend: str = "auto") -> Tensor:
        """Places of the best entries, ascending and padded with PAD: (B, W) int32.

        Nothing waits for the device. The smaller place of two with equal scores comes first; where
        a GPU is left to torch, topk decides, each time alike.
        """
        places: Tensor = registry.run("top_k", self, backend)
        return places


class Reference:
    """Top-k in torch, on any device."""

    @staticmethod
    def supports(call: TopKCall) -> str | None:
        """The reason why this backend cannot serve the call: always None."""
        return None

    @staticmethod
    def run(call: TopKCall) -> Tensor:
        """See TopKCall.run."""
        scores = call.scores
        if call.ends is not None:
            behind = torch.arange(scores.shape[-1], device=scores.device) >= call.ends[:, None]
            scores = scores.masked_fill(behind, float("-inf"))
        return best(scores, call.width, most=call.counts)


def best(
    scores: Tensor,
    size: int,
    *,
    coverage: float | None = None,
    forced: int = 0,
    most: Tensor | None = None,
) -> Tensor:
    """Places of the best entries of each row, ascending and padded with PAD: (B, ..., W) int32.

    Args:
        scores: (B, ..., n) fp32, -inf for what must not be taken. With a coverage its mass: none
            below 0, in all at most 1,024.
        size: how many entries are taken at most; W is this, or n.
        coverage: None, or the fraction of all its mass that a row wants: it takes the fewest
            entries that hold it, and none without mass.
        forced: number of first entries that are taken before the rest, whatever their scores (but
            -inf).
        most: None, or (B,) int32, how many entries of each row are taken at most, too.
    """
    width = min(size, scores.shape[-1])
    marked = scores.clone()
    first = marked[..., :forced]
    first.masked_fill_(first != float("-inf"), float("inf"))
    order = _best_first(marked, width)
    score = scores.gather(-1, order)
    taken = score != float("-inf")
    if most is not None:
        taken &= torch.arange(width, device=scores.device) < most[:, None]
    if coverage is not None:
        units = score.clamp_min(0).mul_(_UNITS).to(torch.int64)
        before = units.cumsum(dim=-1).sub_(units).to(torch.float64).div_(_UNITS)
        total = scores.clamp_min(0).sum(dim=-1, keepdim=True, dtype=torch.float64)
        # All of the mass is more than any sum of it: rounding must not leave out the last.
        share = 2.0 if coverage >= 1 else coverage
        taken &= ((before < total * share) & (score > 0)) | (order < forced)
    return torch.where(taken, order, PAD).to(torch.int32).sort(dim=-1).values


def _best_first(scores: Tensor, width: int) -> Tensor:
    """Places of the `width` largest scores (..., n) of each row, largest first, int64."""
    if scores.device.type != "cpu":
        return scores.topk(width, dim=-1).indices
    # Bits and place make one 64-bit key: no two are equal, and topk returns the same as a stable
    # sort.
    bits = scores.contiguous().view(torch.int32)
    # As integers the bits of negative numbers run the wrong way round.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    last = scores.shape[-1] - 1
    keys = ordered.mul_(1 << 32).add_(torch.arange(last, -1, -1, device=scores.device))
    return last - (keys.topk(width, dim=-1).values & _LOWER_HALF)


def ascending(mask: Tensor, width: int) -> Tensor:
    """Set positions of `mask`'s last axis, ascending, int32, padded to `width` (or more)."""
    at = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
    return torch.where(mask, at, PAD).sort(dim=-1).values[..., :width].contiguous()


def count_entries(size: int, rows: int, first: int) -> int:
    """Entries of the lists of a head: row r has `size` of them, or first + r if those are fewer."""
    rising = min(max(size - first, 0), rows)
    return rising * first + rising * (rising - 1) // 2 + (rows - rising) * size
