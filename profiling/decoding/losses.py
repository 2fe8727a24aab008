"""Losses of tokens in decode by method: means that are kept, and tables by position.

Shapes: T texts, F forced tokens at the end of each (profiling.quality.forced_decode).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from artifacts.page.layout import aligned
from profiling.evaluation.intervals import Interval, student

# Tokens of a mean that is kept.
BLOCK = 64
# Parts of the forced tokens whose perplexities stand side by side, each of so many tokens at least.
_PARTS = 4
_LEAST = 128


def in_blocks(losses: Tensor) -> tuple[tuple[float, ...], ...]:
    """Means of (T, F) losses over BLOCK tokens each, text by text."""
    return tuple(tuple(part.mean().item() for part in text.split(BLOCK)) for text in losses)


def apart(losses: Tensor, others: Tensor) -> Interval:
    """Losses less those of the same tokens by another method, nats a token, over texts."""
    return student((losses - others).double().mean(1).tolist())


def changed(interval: Interval) -> str:
    """A difference of losses as one of perplexities; a single text has no interval."""
    value, low, high = (
        100 * math.expm1(each) for each in (interval.value, interval.low, interval.high)
    )
    if interval.count > 1:
        between = f" ({low:+.2f} to {high:+.2f})"
    else:
        between = ""
    return f"{value:+.2f}%" + between


@dataclass(frozen=True, kw_only=True)
class Part:
    """Perplexity of the forced tokens from one position on, and their loss less the dense one.

    Attributes:
        change: None of dense attention itself.
    """

    start: int
    perplexity: float
    change: Interval | None


def by_position(losses: Mapping[str, Tensor], dense: Tensor) -> dict[str, list[Part]]:
    """Parts of the forced tokens (T, F) by method; of none where they are too few."""
    size = -(-dense.shape[1] // _PARTS)
    if size < _LEAST:
        return {}
    starts = range(0, dense.shape[1], size)

    def parts(own: Tensor) -> list[Part]:
        pairs = zip(starts, own.split(size, 1), dense.split(size, 1), strict=True)
        return [
            Part(
                start=start,
                perplexity=math.exp(a.mean()),
                change=None if own is dense else apart(a, b),
            )
            for start, a, b in pairs
        ]

    return {name: parts(own) for name, own in losses.items()}


def position_lines(by_method: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Lines of a table of `by_position`, its parts as mappings; of nothing none."""
    if not by_method:
        return []
    lines = [
        [
            "perplexity by position",
            *(f"from {part['start']}" for part in next(iter(by_method.values()))),
        ]
    ]
    for name, parts in by_method.items():
        changes = [
            f" {changed(Interval(**part['change']))}" if part["change"] else "" for part in parts
        ]
        lines.append(
            [
                name,
                *(
                    f"{part['perplexity']:.2f}{change}"
                    for part, change in zip(parts, changes, strict=True)
                ),
            ]
        )
    return aligned(lines)
