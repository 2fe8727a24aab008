"""Rows of a comparison of decode, and their table.

Shapes: T texts, F forced tokens at the end of each (profiling.quality.forced_decode).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from artifacts.page.layout import aligned
from profiling.evaluation.intervals import Interval, student
from profiling.prompts.held_out import Units, unit_means
from profiling.speed.baselines import COLUMNS, cells, of_rounds

_MIB = 2**20
# Tokens of a mean loss in a row.
_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one method; None where they were not asked for.

    Bytes are those of the cache of the timed context.

    Dense attention by our kernel has only times and bytes, so it is listed only if they are
    requested.

    Attributes:
        change, apart: of the loss, in nats a token, against dense and against the first artifact on
            the same tokens, over texts; texts that share some are one unit.
        right: how many of the prompts it answers.
        accuracy: the fraction of them, over units as profiling.prompts.held_out.units has them.
        losses: of 64 tokens, by text.
        tokens: that a KV head of a sparse layer read in a step, on average over all that was
            decoded.
    """

    method: str
    token_seconds: float | None = None
    device_bytes: int | None = None
    bank_bytes: int | None = None
    perplexity: float | None = None
    change: Interval | None = None
    right: int | None = None
    accuracy: Interval | None = None
    tokens: float | None = None
    answers: tuple[str, ...] = ()
    losses: tuple[tuple[float, ...], ...] = ()
    apart: Interval | None = None


def in_blocks(losses: Tensor) -> tuple[tuple[float, ...], ...]:
    """Means of (T, F) losses over _BLOCK tokens each, text by text."""
    return tuple(tuple(part.mean().item() for part in text.split(_BLOCK)) for text in losses)


def apart(losses: Tensor, baseline: Tensor, units: Units) -> Interval:
    """Losses less those of the same tokens by another method, nats a token, over units of texts."""
    differences = (losses - baseline).double().mean(1).tolist()
    return student(unit_means(differences, units))


def table(rows: Sequence[Row], seconds: Mapping[str, Sequence[float]]) -> str:
    """Align the rows as text.

    Args:
        rows: a row for each method.
        seconds: of each method's rounds.
    """
    to_first = any(row.apart for row in rows)
    accuracy = "accuracy"
    if prompts := len(rows[0].answers):
        accuracy = f"accuracy of {prompts}"
    header = ["", "ms/token", "tokens/s", *COLUMNS, "cache MiB", "bank MiB", "tokens read"]
    header += ["perplexity", accuracy]
    if to_first:
        header.append("perplexity to the first's")
    lines = [header]
    for row in rows:
        if seconds:
            speedup = of_rounds(seconds, row.method)
        else:
            speedup = None
        line = [row.method, *_token_cells(row.token_seconds), *cells(speedup)]
        line += [_mib(row.device_bytes), _mib(row.bank_bytes)]
        if row.tokens:
            tokens = f"{row.tokens:.0f}"
        else:
            tokens = "-"
        line += [tokens, _perplexity(row)]
        line.append(_accuracy(row.accuracy))
        if to_first:
            if row.apart:
                apart = _changed(row.apart)
            else:
                apart = "-"
            line.append(apart)
        lines.append(line)
    return "\n".join(aligned(lines))


def _token_cells(seconds: float | None) -> list[str]:
    """Cells of the milliseconds of a token, and tokens a second."""
    if not seconds:
        return ["-", "-"]
    return [f"{1e3 * seconds:.2f}", f"{1 / seconds:.1f}"]


def _mib(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / _MIB:.1f}"


def _perplexity(row: Row) -> str:
    """Perplexity, and its change against dense attention."""
    if not row.perplexity:
        return "-"
    if row.change:
        change = f" {_changed(row.change)}"
    else:
        change = ""
    return f"{row.perplexity:.3f}{change}"


def _changed(interval: Interval) -> str:
    """Format a difference of losses as one of perplexities; a single text has no interval."""
    value, low, high = (
        100 * math.expm1(each) for each in (interval.value, interval.low, interval.high)
    )
    between = f" ({low:+.2f} to {high:+.2f})" if interval.is_known else ""
    return f"{value:+.2f}%{between}"


def _accuracy(interval: Interval | None) -> str:
    """Accuracy with its 95% interval."""
    if interval is None:
        return "-"
    if not interval.is_known:
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
