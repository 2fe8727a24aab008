"""Drops the tokens that a cache's scores rank lowest (H2O, Algorithm 1), in place.

Shapes: B batch, G KV heads, R rows of a cache, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kernels import registry
from kernels.checks import unfit
from kernels.copies import on_device
from kernels.native import build


@dataclass(frozen=True, eq=False, slots=True)
class EvictCall:
    """Drop of one of the first `rows` tokens of each KV head: the lowest before the latest ones.

    The last of them takes its row; nothing else moves (H2O, Algorithm 1, where a token is evicted).
    Sequences may differ in length.

    Attributes:
        keys: (B, G, R, D), contiguous, as are all.
        values: (B, G, R, E).
        scores: (B, G, R) fp32.
        positions: (B, G, R) int32, in the text.
        rows: how many rows of each sequence hold tokens; rows - 1 do afterwards. 0 drops none of
            that sequence.
        latest: of each sequence; tokens from this position on are not dropped; there must be
            others.
        queries: of each sequence; tokens are ranked by their score over (queries - position), how
            many queries saw them; by the score if None.

    Raises:
        ValueError: tensors that do not go together or are not contiguous; numbers that are not one
            for each sequence; one row of a sequence, or more than there are.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    positions: Tensor
    _: KW_ONLY
    rows: Sequence[int]
    latest: Sequence[int]
    queries: Sequence[int] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the keys."""
        return self.keys.device

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors that are written in place."""
        return self.keys, self.values, self.scores, self.positions

    def __post_init__(self) -> None:
        scores = self.scores
        positions = self.positions
        if scores.dtype != torch.float32 or positions.dtype != torch.int32:
            raise ValueError(
                f"scores must be float32 and positions int32, got {scores.dtype} and "
                f"{positions.dtype}"
            )
        if not self.keys.dim() == self.values.dim() == 4 or any(
            x.shape[:3] != scores.shape for x in self.memory
        ):
            raise unfit(keys=self.keys, values=self.values, scores=scores, positions=positions)
        if not all(x.is_contiguous() for x in self.memory):
            raise ValueError(
                "keys, values, scores and positions must be contiguous: they are written in place"
            )
        batch, _, capacity = scores.shape
        arguments = {"rows": self.rows, "latest": self.latest, "queries": self.queries}
        for name, numbers in arguments.items():
            if numbers is not None and len(numbers) != batch:
                raise ValueError(
                    f"{name} must be {batch} numbers, one for each sequence, got {len(numbers)}"
                )
        for count in self.rows:
            if count == 1 or not 0 <= count <= capacity:
                raise ValueError(f"rows must be 0 or 2 to {capacity}, got {count}")

    def run(self, backend: str = "auto") -> None:
        """Drop: by native code ("cpu"), or by torch on any device ("reference")."""
        registry.run("evict", self, backend)


class Native:
    """Eviction in native code, on the CPU (sums.cpp)."""

    @staticmethod
    def supports(call: EvictCall) -> str | None:
        """The reason why this backend cannot serve the call; None where it can."""
        if call.device.type != "cpu":
            return f"it drops tokens of a cache on the CPU, not on {call.device.type}"
        return build.load()

    @staticmethod
    def run(call: EvictCall) -> None:
        """See EvictCall."""
        torch.ops.headwise.drop_lowest(
            *call.memory, list(call.rows), list(call.latest), list(call.queries or ())
        )


class Reference:
    """Eviction in torch, on any device."""

    @staticmethod
    def supports(call: EvictCall) -> str | None:
        """The reason why this backend cannot serve the call: always None."""
        return None

    @staticmethod
    def run(call: EvictCall) -> None:
        """See EvictCall."""
        slots = torch.arange(max(call.rows), device=call.device)
        scores = call.scores[:, :, : len(slots)]
        positions = call.positions[:, :, : len(slots)]
        ranked = ranks(scores, positions, latest=call.latest, queries=call.queries)
        ends = on_device(tuple(call.rows), call.device)[:, None, None]
        victims = ranked.masked_fill(slots >= ends, torch.inf).argmin(dim=2, keepdim=True)
        lasts = (ends - 1).expand_as(victims)
        # The last row of a sequence that drops nothing stays where it is.
        lasts = torch.where(ends > 0, lasts, victims)
        for tensor in call.memory:
            source = lasts
            target = victims
            if tensor.dim() == 4:
                source = lasts[..., None].expand(-1, -1, -1, tensor.shape[3])
                target = victims[..., None].expand_as(source)
            tensor.scatter_(2, target, tensor.gather(2, source))


def ranks(
    scores: Tensor,
    positions: Tensor,
    *,
    latest: Sequence[int],
    queries: Sequence[int] | None = None,
) -> Tensor:
    """(B, G, R): what EvictCall goes by, infinite for the latest of each sequence."""
    if queries is not None:
        seen_by = on_device(tuple(queries), scores.device, torch.int32)[:, None, None] - positions
        scores = scores / seen_by
    first = on_device(tuple(latest), scores.device, torch.int32)[:, None, None]
    return scores.masked_fill(positions >= first, torch.inf)
