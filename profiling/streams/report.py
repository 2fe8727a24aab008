"""Results of a stream: a row for each method as text, and means over blocks as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from artifacts.page.layout import aligned
from profiling.evaluation.intervals import share_of
from profiling.streams.config import RECOMPUTED
from profiling.streams.feed import BlockStats, TokenStream

_MIB = 2**20
_QUARTERS = ("1st quarter", "2nd", "3rd", "4th")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method's figures; None where they were not measured.

    Attributes:
        method: its name.
        perplexity: over all tokens; of the recomputed window over the probes.
        quarters: the same of each quarter of the stream, by the ends of blocks.
        ratio: of perplexities on the probes past the window, to the recomputed window's.
        low: lower bound of its 95% interval by Student's t. Segments of the stream as long as the
            window are the samples; fewer than two have no bounds.
        high: upper bound.
        token_seconds: of each token fed, or of each forward of the recomputed window.
        cache_bytes: keys and values at the end.
    """

    method: str
    perplexity: float
    quarters: tuple[float | None, ...]
    ratio: float | None
    low: float | None
    high: float | None
    token_seconds: float
    cache_bytes: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Series:
    """One method's figures block by block.

    Attributes:
        method: its name.
        ends: where each block ends, in tokens.
        blocks: figures of each.
    """

    method: str
    ends: tuple[int, ...]
    blocks: tuple[BlockStats, ...]

    @property
    def probed(self) -> np.ndarray:
        """-log p of each probe."""
        return np.array([value for block in self.blocks for value in block.probed])

    def perplexity(self, start: float, end: float) -> float | None:
        """Perplexity of the blocks that end in (start, end]; None where there are none."""
        pairs = zip(self.ends, self.blocks, strict=True)
        within = [block for at, block in pairs if start < at <= end]
        count = sum(block.tokens for block in within)
        if not count:
            return None
        return _exp(sum(block.nll for block in within) / count)


def rows(series: Sequence[Series], stream: TokenStream, window: int) -> list[Row]:
    """Make the rows of all methods.

    Args:
        series: every method's.
        stream: the tokens that were fed.
        window: tokens of the recomputed window.
    """
    base = next((each for each in series if each.method == RECOMPUTED), None)
    return [_row(each, base, stream, window) for each in series]


def _row(series: Series, base: Series | None, stream: TokenStream, window: int) -> Row:
    low = high = ratio = None
    if base is not None and series is not base:
        ratio, low, high = _ratio_to(series, base, stream, window)
    quarter = stream.tokens / 4
    count = max(1, sum(block.tokens for block in series.blocks))
    return Row(
        method=series.method,
        perplexity=_exp(sum(block.nll for block in series.blocks) / count),
        quarters=tuple(series.perplexity(at * quarter, (at + 1) * quarter) for at in range(4)),
        ratio=ratio,
        low=low,
        high=high,
        token_seconds=sum(block.seconds for block in series.blocks) / count,
        cache_bytes=series.blocks[-1].cache_bytes,
    )


def _ratio_to(
    series: Series, base: Series, stream: TokenStream, window: int
) -> tuple[float | None, float | None, float | None]:
    """Ratio of perplexities on the probes past the window, with its 95% interval over segments."""
    token = np.array(stream.probes, dtype=int)
    past = token > window
    if not past.any():
        return None, None, None
    difference = (series.probed - base.probed)[past]
    segment = token[past] // window
    segments, counts = np.unique(segment, return_counts=True)
    sums = [float(difference[segment == each].sum()) for each in segments]
    interval = share_of(sums, counts.tolist())
    if len(segments) < 2:
        return math.exp(interval.value), None, None
    return math.exp(interval.value), math.exp(interval.low), math.exp(interval.high)


def _exp(nll: float) -> float:
    if nll < 700:
        return math.exp(nll)
    return math.inf


def table(rows: Sequence[Row]) -> str:
    """Align the rows as text."""
    lines = [["", "perplexity", *_QUARTERS, "/ recomputed", "ms/token", "cache MiB"]]
    for row in rows:
        perplexities = (row.perplexity, *row.quarters)
        quality = ["-" if value is None else f"{value:.2f}" for value in perplexities]
        size = "-" if row.cache_bytes is None else f"{row.cache_bytes / _MIB:.1f}"
        lines.append([row.method, *quality, _ratio(row), f"{1e3 * row.token_seconds:.2f}", size])
    return "\n".join(aligned(lines))


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    if row.low is None:
        return f"{row.ratio:.3f}"
    return f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f})"


def means(series: Series) -> dict[str, list[float | int | None]]:
    """Means of each block by name; None where nothing was measured in it."""
    blocks = series.blocks
    return {
        "end": list(series.ends),
        "nll": [round(block.nll / block.tokens, 5) if block.tokens else None for block in blocks],
        "token_seconds": [
            float(f"{block.seconds / block.tokens:.4g}") if block.tokens else None
            for block in blocks
        ],
        "cache_bytes": [block.cache_bytes for block in blocks],
    }


def record(series: Sequence[Series], rows: Sequence[Row]) -> dict[str, Any]:
    """The rows, and for each method means over blocks, as JSON."""
    return {
        "rows": [asdict(row) for row in rows],
        "blocks": {each.method: means(each) for each in series},
    }
