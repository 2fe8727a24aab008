"""Top-k of each row, by number or by mass, for patterns, OmniKV and vLLM.

Shapes: B batch, h heads of one kind, n entries of a row, W the largest number that any head takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kernels import registry
from kernels.copies import DeviceConstant, on_device, sized_cache
from kernels.index import PAD

# Mass is added up in whole numbers: what fp32 adds up to depends on the order, and on a GPU the
# order on the run.
_UNITS = 2.0**40
_LOWER_HALF = 0xFFFFFFFF


@dataclass(frozen=True, eq=False, slots=True)
class TopKCall:
    """Choice of the best entries of each row of fp32 scores (B, h, ..., n).

    Attributes:
        scores: any numbers; -inf for what must not be taken. Where a head has a coverage, its mass:
            none below 0, in all at most 1,024.
        sizes: how many of its entries head i takes at most; W is the largest of these, or n.
        coverage: None, or the fraction of all its mass that head i wants: it takes the fewest
            entries that hold it, and none without mass.
        forced: number of first entries that are taken before the rest, whatever their scores (but
            -inf).
        ends: (B,) int32, the end of each row of a sequence: entries from there on are not read; n
            by default.
        counts: (B,) int32, how many entries any head of a sequence takes at most, in addition to
            `sizes`.
    """

    scores: Tensor
    sizes: Sequence[int]
    coverage: Sequence[float | None]
    _: KW_ONLY
    forced: int
    ends: Tensor | None = None
    counts: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the scores."""
        return self.scores.device

    def run(self, backend: str = "auto") -> Tensor:
        """Places of the best entries, ascending and padded with PAD: (B, h, ..., W) int32.

        Nothing waits for the device. The smaller place of two with equal scores comes first; where
        a GPU is left to torch, as it is with a coverage, topk decides, each time alike.
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
        sizes = call.sizes
        coverage = call.coverage
        forced = call.forced
        width = min(max(sizes), scores.shape[-1])
        if call.ends is not None:
            behind = torch.arange(scores.shape[-1], device=scores.device) >= _each_sequence(
                call.ends, scores
            )
            scores = scores.masked_fill(behind, float("-inf"))
        marked = scores.clone()
        first = marked[..., :forced]
        first.masked_fill_(first != float("-inf"), float("inf"))
        best = _best_first(marked, width)
        score = scores.gather(-1, best)
        place = torch.arange(width, device=scores.device)
        taken = (place < _each_head(sizes, scores)) & (score != float("-inf"))
        if call.counts is not None:
            taken &= place < _each_sequence(call.counts, scores)
        if any(share is not None for share in coverage):
            units = score.clamp_min(0).mul_(_UNITS).to(torch.int64)
            before = units.cumsum(dim=-1).sub_(units).to(torch.float64).div_(_UNITS)
            total = scores.clamp_min(0).sum(dim=-1, keepdim=True, dtype=torch.float64)
            # All of the mass is more than any sum of it: rounding must not leave out the last.
            shares = [2.0 if share is None or share >= 1 else share for share in coverage]
            wanted = (before < total * _each_head(shares, scores, torch.float64)) & (score > 0)
            whole = _each_head([share is None for share in coverage], scores, torch.bool)
            taken &= wanted | whole | (best < forced)
        return torch.where(taken, best, PAD).to(torch.int32).sort(dim=-1).values


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


def _each_head(values: Sequence[float], scores: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """One number a head, to go with (B, h, ..., W)."""
    return on_device(tuple(values), scores.device, dtype).view(-1, *[1] * (scores.dim() - 2))


def _each_sequence(values: Tensor, scores: Tensor) -> Tensor:
    """One number a sequence (B,), to go with (B, h, ..., W)."""
    return values.view(-1, *[1] * (scores.dim() - 1))


def ascending(mask: Tensor, width: int) -> Tensor:
    """Set positions of `mask`'s last axis, ascending, int32, padded to `width` (or more)."""
    at = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
    return torch.where(mask, at, PAD).sort(dim=-1).values[..., :width].contiguous()


def csr_offsets(
    sizes: tuple[int, ...],
    batch: int,
    rows: int,
    first: int,
    device: torch.device,
) -> tuple[Tensor, int]:
    """Offsets of each row's list, (B, h, R + 1) int64, and the number of entries in all.

    Head i lists at most sizes[i] tiles, and no more than lie before the row's own, at key tile
    first + r. Not to be written to.
    """
    offsets, total = _made(sizes, batch, rows, first, device)
    return offsets.read(), total


def count_entries(size: int, rows: int, first: int) -> int:
    """Entries of the lists of a head: row r has `size` of them, or first + r if those are fewer."""
    rising = min(max(size - first, 0), rows)
    return rising * first + rising * (rising - 1) // 2 + (rows - rising) * size


@sized_cache(lambda made: made[0].nbytes, 1 << 26)
def _made(
    sizes: tuple[int, ...],
    batch: int,
    rows: int,
    first: int,
    device: torch.device,
) -> tuple[DeviceConstant, int]:
    with torch.inference_mode(False):
        before, limit = (
            torch.as_tensor(x, device="cpu", dtype=torch.long)
            for x in (range(first, first + rows), sizes)
        )
        counts = torch.minimum(limit[:, None], before).repeat(batch, 1)
        ends = counts.flatten().cumsum(0).view(batch * len(sizes), rows)
        offsets = torch.cat([ends[:, :1] - counts[:, :1], ends], dim=1).view(
            batch, len(sizes), rows + 1
        )
        total = 0
        if offsets.numel():
            total = int(ends.max())
        return DeviceConstant.from_host(offsets, device), total


def scatter_rows(tiles: Tensor, offsets: Tensor, lists: Tensor) -> None:
    """Write the lists (B, h, rows, any width) to their offsets (B, h, rows + 1).

    tiles (T + 1): its last entry takes the padding that exceeds a list.
    """
    at = offsets[..., :-1, None] + on_device(tuple(range(lists.shape[-1])), tiles.device)
    tiles.scatter_(
        0, torch.where(at < offsets[..., 1:, None], at, len(tiles) - 1).flatten(), lists.flatten()
    )
