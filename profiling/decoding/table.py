"""Rows of a comparison of decode, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from artifacts.page.layout import aligned
from profiling.decoding.losses import changed
from profiling.evaluation.intervals import Interval, wilson
from profiling.speed.baselines import COLUMNS, cells, of_rounds

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one method; None where they were not asked for.

    Bytes are those of the cache of the timed context.

    Of dense attention by our kernel only time and bytes are measured: it is there where they are
    asked for.

    Attributes:
        change, apart: of the loss, in nats a token, against dense and against the first artifact on
            the same tokens, over texts.
        losses: of 64 tokens, by text.
        tokens: that a KV head of a sparse layer read in a step, on average over all that was
            decoded.
        batch: the most sequences whose caches fit into the memory asked for.
        batch_rate: tokens a second of all of them.
    """

    method: str
    token_seconds: float | None = None
    device_bytes: int | None = None
    bank_bytes: int | None = None
    perplexity: float | None = None
    change: Interval | None = None
    right: int | None = None
    tokens: float | None = None
    answers: tuple[str, ...] = ()
    losses: tuple[tuple[float, ...], ...] = ()
    apart: Interval | None = None
    batch: int | None = None
    batch_rate: float | None = None


def table(rows: Sequence[Row], seconds: Mapping[str, Sequence[float]], trials: int) -> str:
    """Align the rows as text.

    Args:
        seconds: of each method's rounds.
    """
    rates = {row.method: [1 / row.batch_rate] for row in rows if row.batch_rate}
    to_first = any(row.apart for row in rows)
    if trials:
        accuracy = f"accuracy of {trials}"
    else:
        accuracy = "accuracy"
    header = ["", "ms/token", "tokens/s", *COLUMNS, "cache MiB", "bank MiB", "tokens read"]
    header += ["perplexity", accuracy]
    if to_first:
        header.append("perplexity to the first's")
    if rates:
        header += ["batch", "tokens/s", *COLUMNS]
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
        line.append(_accuracy(row.right, trials))
        if to_first:
            if row.apart:
                apart = changed(row.apart)
            else:
                apart = "-"
            line.append(apart)
        if rates:
            line += _batch_cells(row, rates)
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
        change = f" {changed(row.change)}"
    else:
        change = ""
    return f"{row.perplexity:.3f}{change}"


def _accuracy(right: int | None, questions: int) -> str:
    """Accuracy with Wilson's 95% interval."""
    if right is None:
        return "-"
    interval = wilson(right, questions)
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _batch_cells(row: Row, rates: Mapping[str, Sequence[float]]) -> list[str]:
    """Cells of the largest batch: size, tokens a second, speed-up over dense batches."""
    if row.batch_rate is None:
        return ["-"] * (2 + len(COLUMNS))
    return [str(row.batch), f"{row.batch_rate:.1f}", *cells(of_rounds(rates, row.method))]
