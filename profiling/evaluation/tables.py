"""The summary of an evaluation: one table for each length, from which every report is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiling.evaluation.record import figures_at, summary_tasks
from profiling.evaluation.rows import SCORE
from profiling.evaluation.summary import ALL
from profiling.prompts.prompt import KINDS, parse_name
from profiling.speed.baselines import (
    COLUMNS,
    HEADWISE,
    KERNEL,
    MODEL,
    Speedup,
    cells,
    speedup,
)

_FIRST_TOKEN = "first token s"
_ATTENTION = "attention s"
_DENSITY = "density"
_KEPT = "kept"
_TOKENS = "tokens/s"
_CACHE = "cache MiB"
_PEAK = "peak MiB"
# Columns in their order, those of tasks after _KEPT.
_BEFORE = {
    _FIRST_TOKEN: "seconds to the first token of a prompt, index builds included",
    COLUMNS[0]: "times as fast as the fastest dense baseline: sdpa, or Headwise's dense kernel",
    COLUMNS[1]: "times as fast as the model's default attention",
    _ATTENTION: "seconds of attention alone in one prefill, index builds included",
    _DENSITY: "fraction of the causal area that prefill computes, mean over heads",
    _KEPT: "fraction of the prompt's keys and values that decode attends to",
}
_AFTER = {
    _TOKENS: "decoded tokens a second after a prompt of that length",
    _CACHE: "keys and values after the prompt",
    _PEAK: "peak memory of a prefill on top of the model's",
}
# Columns that describe a method, without measurements.
_SIZES = (_DENSITY, _KEPT)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a table.

    Attributes:
        verdict: "better" or "worse" than dense, "few" for too few prompts, else "".
        low, high: bounds of the 95% interval as text, "" without one.
    """

    text: str
    verdict: str = ""
    low: str = ""
    high: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """All methods at one length; columns without any value and methods without any are left out.

    Attributes:
        columns: meanings by column name.
        rows: cells by column of each method, by name.
    """

    length: int
    columns: dict[str, str]
    rows: dict[str, dict[str, Cell]]


def build_table(record: Mapping[str, Any], length: int) -> Table:
    """Make the table of a record at one length."""
    figures = figures_at(record, length)
    tasks = {column_name(*place): place for place in summary_tasks(figures)}
    rows = {}
    for method in _methods_at(record, length):
        name = method["name"]
        row = _times(record, name, length)
        for column, (task, measure) in tasks.items():
            if estimate := figures.get((task, measure, name)):
                row[column] = _cell(estimate)
        if not row:
            continue
        for column in _SIZES:
            if method[column] is not None:
                row[column] = Cell(text=number(method[column]))
        rows[name] = row
    columns = {**_BEFORE, **{name: _described(*place) for name, place in tasks.items()}, **_AFTER}
    present = {column for row in rows.values() for column in row}
    return Table(
        length=length,
        columns={name: says for name, says in columns.items() if name in present},
        rows=rows,
    )


def column_name(task: str, measure: str) -> str:
    """The name of a task's column."""
    if measure == SCORE:
        return task
    return f"{task} {measure}"


def number(value: float) -> str:
    """A value with the digits that matter."""
    if abs(value) < 100:
        return f"{value:.3f}"
    return f"{value:,.1f}"


def entry_of(entries: list[dict[str, Any]], name: str, length: int) -> dict[str, Any] | None:
    """The entry of a method at a length; None where there is none."""
    wanted = (name, length)
    return next((each for each in entries if (each["method"], each["length"]) == wanted), None)


def speedup_of(timed: Mapping[str, Any]) -> Speedup:
    """The speed-up of an entry of `prefill` or `decode`."""
    return speedup(timed["rounds"], timed["dense_rounds"])


def _described(task: str, measure: str) -> str:
    """Describe the column of a task's measure."""
    if task == ALL:
        return f"{measure} over the answers of all tasks together"
    kind = KINDS.get(parse_name(task))
    if kind is None:
        return measure
    return f"{kind.asks}; {kind.scored if measure == SCORE else measure}"


def _methods_at(record: Mapping[str, Any], length: int) -> list[dict[str, Any]]:
    """List the methods at a length, Headwise's dense kernel after the default where timed."""
    methods = [each for each in record["methods"] if each["length"] == length]
    timed = {each["method"] for each in record["prefill"] if each["length"] == length}
    if KERNEL in timed and all(each["name"] != KERNEL for each in methods):
        methods.insert(1, {"name": KERNEL, "length": length, _DENSITY: 1.0, _KEPT: 1.0})
    return methods


def _times(record: Mapping[str, Any], name: str, length: int) -> dict[str, Cell]:
    """Return the cells of a method's measured times."""
    texts: dict[str, str] = {}
    if timed := entry_of(record["prefill"], name, length):
        texts[_FIRST_TOKEN] = f"{timed['seconds']:.3f}"
        texts |= zip(COLUMNS, cells(speedup_of(timed)), strict=True)
    if seconds := _attention(record, name, length):
        texts[_ATTENTION] = f"{seconds:.3f}"
    if decoded := entry_of(record["decode"], name, length):
        texts[_TOKENS] = f"{decoded['tokens_per_second']:.1f}"
        texts[_CACHE] = _mebibytes(decoded["cache_bytes"])
    if peak := entry_of(record["memory"], name, length):
        texts[_PEAK] = _mebibytes(peak["bytes"])
    return {column: Cell(text=text) for column, text in texts.items()}


def _attention(record: Mapping[str, Any], name: str, length: int) -> float | None:
    """Seconds of attention alone by a method; of dense attention those of Headwise's rounds."""
    is_dense = name in (MODEL, KERNEL)
    own = entry_of(record["attention"], HEADWISE if is_dense else name, length)
    if own is None:
        return None
    seconds: float | None = own["dense"].get(name) if is_dense else own["seconds"]
    return seconds


def _cell(estimate: Mapping[str, Any]) -> Cell:
    bounds: dict[str, str] = {}
    if estimate["low"] is not None:
        bounds = {name: number(estimate[name]) for name in ("low", "high")}
    return Cell(
        text=number(estimate["value"]),
        verdict=estimate["verdict"] or ("few" if estimate["few"] else ""),
        **bounds,
    )


def _mebibytes(value: int) -> str:
    return f"{value / 2**20:,.1f}"
