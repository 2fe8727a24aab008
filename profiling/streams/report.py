"""Results of a stream: a row for each method, and means over blocks as JSON, CSV, picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.page.layout import aligned
from profiling.evaluation.intervals import share_of
from profiling.pictures.drawing import legend_columns, line_style, new_figure, save, save_table
from profiling.streams.config import Streamed
from profiling.streams.methods import Stretch
from profiling.streams.speed import SPEED_ROUNDS
from profiling.streams.tokens import TokenStream

_MIB = 2**20
# The mean is drawn over so many points at most.
_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method's figures; None where they were not measured.

    Attributes:
        perplexity: over all tokens, of the recomputed window over the probes.
        last_quarter: over the stream's end.
        ratio, low, high: of perplexities on the probes past the window, to the recomputed window's,
            with its 95% interval by Student's t over stretches of the stream as long as the window:
            what stands in one window is one sample. No bounds of fewer than two.
        accuracy: share of the probes, answers to questions, of which every token was the likeliest.
        token_seconds: for each token fed, or each forward.
        cache_bytes: at the end.
    """

    method: str
    perplexity: float
    last_quarter: float
    ratio: float | None
    low: float | None
    high: float | None
    accuracy: float | None
    token_seconds: float
    cache_bytes: int | None
    process_bytes: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Series:
    """One method's stretches, block by block, and where each ends."""

    method: str
    ends: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    @property
    def probed(self) -> np.ndarray:
        """-log p of each token of the probes."""
        return np.array([value for stretch in self.stretches for value in stretch.probed])

    def right(self, stream: TokenStream) -> np.ndarray:
        """Tell for each probe if every token was the likeliest."""
        tokens = [value for stretch in self.stretches for value in stretch.right]
        starts = np.cumsum([0, *(end - begin for begin, end in stream.probes)])
        return np.array([all(tokens[a:b]) for a, b in pairwise(starts.tolist())])

    def nll(self, start: int = 0) -> float:
        """Mean -log p of the tokens in blocks that end after `start`; NaN where there are none."""
        after = [
            stretch for end, stretch in zip(self.ends, self.stretches, strict=True) if end > start
        ]
        count = sum(stretch.tokens for stretch in after)
        if count:
            return sum(stretch.nll for stretch in after) / count
        return math.nan


def rows(series: Sequence[Series], stream: TokenStream, whole: int, task: str) -> list[Row]:
    """Make the rows of all methods.

    Args:
        whole: tokens that the windows hold.
    """
    base = next((each for each in series if each.method == "recomputed"), None)
    return [_row(each, base, stream, whole, task) for each in series]


def _row(series: Series, base: Series | None, stream: TokenStream, whole: int, task: str) -> Row:
    """Make one method's row.

    Args:
        base: the recomputed window.
    """
    low = high = ratio = accuracy = None
    if base is not None and series is not base:
        ratio, low, high = _ratio_to(series, base, stream, whole)
    if task == "stream_eval":
        accuracy = float(series.right(stream).mean())
    turns = sum(stretch.turns for stretch in series.stretches)
    seconds = sum(stretch.seconds for stretch in series.stretches)
    last = series.stretches[-1]
    return Row(
        method=series.method,
        perplexity=_exp(series.nll()),
        last_quarter=_exp(series.nll(stream.tokens * 3 // 4)),
        ratio=ratio,
        low=low,
        high=high,
        accuracy=accuracy,
        token_seconds=seconds / max(turns, 1),
        cache_bytes=last.cache_bytes,
        process_bytes=last.process_bytes,
    )


def _ratio_to(
    series: Series, base: Series, stream: TokenStream, whole: int
) -> tuple[float | None, float | None, float | None]:
    """Ratio of perplexities on the probes past the window, with its 95% interval over windows."""
    if not stream.probes:
        return None, None, None
    token = np.concatenate([np.arange(*span) for span in stream.probes])
    past = token > whole
    if not past.any():
        return None, None, None
    difference = (series.probed - base.probed)[past]
    window = token[past] // whole
    windows, counts = np.unique(window, return_counts=True)
    sums = [float(difference[window == each].sum()) for each in windows]
    interval = share_of(sums, counts.tolist())
    if len(windows) < 2:
        return math.exp(interval.value), None, None
    return math.exp(interval.value), math.exp(interval.low), math.exp(interval.high)


def _exp(nll: float) -> float:
    if nll < 700:
        return math.exp(nll)
    return math.inf


def table(rows: Sequence[Row]) -> str:
    """Align the rows as text."""
    header = ["", "perplexity", "last quarter", "/ recomputed", "accuracy", "ms/token"]
    lines = [[*header, "cache MiB", "process MiB"]]
    for row in rows:
        quality = [f"{row.perplexity:.2f}", f"{row.last_quarter:.2f}", _ratio(row)]
        if row.accuracy is None:
            accuracy = "-"
        else:
            accuracy = f"{row.accuracy:.3f}"
        sizes = [_mib(row.cache_bytes), _mib(row.process_bytes)]
        lines.append([row.method, *quality, accuracy, f"{1e3 * row.token_seconds:.2f}", *sizes])
    return "\n".join(aligned(lines))


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    if row.low is None:
        return f"{row.ratio:.3f}"
    return f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f})"


def _mib(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / _MIB:.1f}"


def report(config: Streamed, rows: Sequence[Row], record: dict[str, Any]) -> str:
    """Make the table, and notes on what it does not say."""
    lines = [table(rows)]
    settings = record["settings"]
    if settings["repeats"]:
        lines.append(
            f"the text is shorter than the stream: it was begun again {settings['repeats']} times"
        )
    if "recomputed" in config.methods:
        where = f"at one token in {config.stride}"
        if config.task == "stream_eval":
            where = "at the answers"
        lines.append(
            f"recomputed: {where} only; the ratios are over those of them that are past the window"
        )
    medians = {
        name: sorted(values)[len(values) // 2] for name, values in (record["timed"] or {}).items()
    }
    base = medians.get("recomputed")
    for name, seconds in medians.items():
        line = (
            f"one by one, {name}: {1e3 * seconds:.2f} ms a token (median of {SPEED_ROUNDS} rounds)"
        )
        if base and name != "recomputed":
            line += f", {base / seconds:.1f}x as fast as recomputed"
        lines.append(line)
    return "\n".join(lines)


def plain(series: Sequence[Series], rows: Sequence[Row]) -> dict[str, Any]:
    """For a JSON file: the rows, and for each method means over blocks."""
    return {
        "rows": [asdict(row) for row in rows],
        "blocks": {own.method: _means(own) for own in series},
    }


def _means(series: Series) -> dict[str, list[float | int | None]]:
    """Means of each block by name; None where nothing was measured in it."""
    parts = series.stretches
    return {
        "end": list(series.ends),
        "nll": [round(part.nll / part.tokens, 5) if part.tokens else None for part in parts],
        "token_seconds": [
            float(f"{part.seconds / part.turns:.4g}") if part.turns else None for part in parts
        ],
        "cache_bytes": [part.cache_bytes for part in parts],
        "process_bytes": [part.process_bytes for part in parts],
    }


def draw(
    folder: Path, series: Sequence[Series], stream: TokenStream, task: str, caption: str
) -> list[Path]:
    """Draw stream.png, .svg and .csv: log perplexity or accuracy, time per token, memory.

    As StreamingLLM's Figures 3, 5 and 10.
    """
    means = {own.method: _means(own) for own in series}
    header = ["method", "end", "nll", "token_seconds", "cache_bytes", "process_bytes"]
    values = (
        [method, *("" if value is None else value for value in row)]
        for method, mean in means.items()
        for row in zip(*(mean[name] for name in header[1:]), strict=True)
    )
    return [
        *save(_figure(series, means, stream, task, caption), folder / "stream"),
        save_table(folder / "stream", header, values),
    ]


def _figure(
    series: Sequence[Series], means: Mapping[str, Any], stream: TokenStream, task: str, caption: str
) -> Any:
    from matplotlib.ticker import LogFormatter

    width = 8.0
    figure = new_figure(width, 5.6, caption)
    grid = figure.subplot_mosaic(
        [["quality", "quality"], ["time", "memory"]], height_ratios=[1.5, 1]
    )
    for at, own in enumerate(series):
        # Wide below narrow: methods that do equally well are all to be seen.
        width = max(1.0, 3.0 - 0.5 * at)
        mean = means[own.method]
        style = {**line_style(at), "linewidth": width, "label": own.method}
        x = np.array(own.ends)
        if task == "stream_eval":
            places = np.array([end for _, end in stream.probes])
            right = own.right(stream).astype(float)
            parts = np.array_split(np.arange(len(right)), min(len(right), 20))
            grid["quality"].plot(
                [places[p[-1]] for p in parts], [right[p].mean() for p in parts], **style
            )
        else:
            grid["quality"].plot(*_fewer(x, mean["nll"]), **style)
        grid["time"].plot(*_fewer(x, mean["token_seconds"], 1e3), **style)
        if any(value is not None for value in mean["cache_bytes"]):
            grid["memory"].plot(*_fewer(x, mean["cache_bytes"], 1 / _MIB), **style)
    if task == "stream_eval":
        y_label = "answers right"
    else:
        y_label = "log perplexity"
    grid["quality"].set_ylabel(y_label)
    grid["quality"].legend(
        fontsize=7,
        frameon=False,
        ncols=legend_columns(means, width - 1, 7),
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )
    for name, label in (("time", "ms per token"), ("memory", "MiB of keys and values")):
        grid[name].set_yscale("log")
        for which in (grid[name].yaxis.set_major_formatter, grid[name].yaxis.set_minor_formatter):
            which(LogFormatter(minor_thresholds=(2, 0.5)))
        grid[name].set_ylabel(label)
    for axes in grid.values():
        axes.set_xlabel("tokens")
        axes.grid(color="#E0E0E0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _fewer(
    x: np.ndarray, values: Sequence[float | None], factor: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Means of neighbours where there are too many points to see."""
    y = np.array([np.nan if value is None else value for value in values], dtype=float) * factor
    measured = np.isfinite(y)
    x = x[measured]
    y = y[measured]
    if len(x):
        parts = np.array_split(np.arange(len(x)), min(len(x), _POINTS))
    else:
        parts = []
    return np.array([x[p[-1]] for p in parts]), np.array([y[p].mean() for p in parts])
