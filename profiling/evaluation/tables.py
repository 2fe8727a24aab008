"""The summary of an evaluation: one table for each length, from which every report is made."""

from __future__ import annotations

from dataclasses import dataclass

from profiling.evaluation.record import MethodRow, Record
from profiling.evaluation.rows import SCORE
from profiling.evaluation.summary import ALL, Estimate
from profiling.evaluation.times import DENSE, row_of
from profiling.prompts.prompt import KINDS, parse_name
from profiling.speed.baselines import COLUMNS, HEADWISE, KERNEL, cells

_FIRST_TOKEN = "first token s"
_ATTENTION = "attention s"
_DENSITY = "density"
_KEPT = "kept"
_STEP = "ms/token"
_CACHE = "cache MiB"
_BANK = "bank MiB"
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
    _STEP: "milliseconds of a decoded token after so many tokens",
    _CACHE: "keys and values of these tokens",
    _BANK: "of which in CPU memory beside the device",
    _PEAK: "peak memory of a prefill on top of the model's",
}


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


def build_table(record: Record, length: int) -> Table:
    """Make the table of a record at one length."""
    tasks = {column_name(*place): place for place in record.columns(length)}
    rows = {}
    for name, method in _methods_at(record, length).items():
        row = _times(record, name, length)
        for column, (task, measure) in tasks.items():
            if estimate := record.estimate(task, measure, name, length):
                row[column] = _cell(estimate)
        if not row:
            continue
        row |= _sizes(method)
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


def _described(task: str, measure: str) -> str:
    """Describe the column of a task's measure."""
    if task == ALL:
        return f"{measure} over the answers of all tasks together"
    kind = KINDS.get(parse_name(task))
    if kind is None:
        return measure
    return f"{kind.asks}; {kind.scored if measure == SCORE else measure}"


def _methods_at(record: Record, length: int) -> dict[str, MethodRow | None]:
    """The methods by name, in their order; Headwise's dense kernel is second where it was timed."""
    described = {each.name: each for each in record.methods if each.length == length}
    names = list(dict.fromkeys((*described, *record.config.methods)))
    rows = (*record.times.prefill, *record.times.decode)
    if KERNEL not in names and row_of(rows, KERNEL, length):
        names.insert(1, KERNEL)
    return {name: described.get(name) for name in names}


def _sizes(method: MethodRow | None) -> dict[str, Cell]:
    """Cells that describe a method, without measurements."""
    if method is None:
        return {}
    sizes = {_DENSITY: method.density, _KEPT: method.kept}
    return {name: Cell(text=number(size)) for name, size in sizes.items() if size is not None}


def _times(record: Record, name: str, length: int) -> dict[str, Cell]:
    """Return the cells of a method's measured times."""
    times = record.times
    texts: dict[str, str] = {}
    prefill = row_of(times.prefill, name, length)
    decode = row_of(times.decode, name, length)
    if prefill:
        texts[_FIRST_TOKEN] = f"{prefill.seconds:.3f}"
    if timed := prefill or decode:
        texts |= zip(COLUMNS, cells(timed.timed.speedup), strict=True)
    if seconds := _attention(record, name, length):
        texts[_ATTENTION] = f"{seconds:.3f}"
    if decode:
        texts[_STEP] = f"{1e3 * decode.seconds:.2f}"
        texts[_CACHE] = _mebibytes(decode.timed.cache + decode.timed.bank)
        if decode.timed.bank:
            texts[_BANK] = _mebibytes(decode.timed.bank)
    if peak := row_of(times.memory, name, length):
        texts[_PEAK] = _mebibytes(peak.bytes)
    return {column: Cell(text=text) for column, text in texts.items()}


def _attention(record: Record, name: str, length: int) -> float | None:
    """Seconds of attention alone by a method; of dense attention those of Headwise's rounds."""
    is_dense = name in DENSE
    own = row_of(record.times.attention, HEADWISE if is_dense else name, length)
    if own is None:
        return None
    return own.dense.get(name) if is_dense else own.seconds


def _cell(estimate: Estimate) -> Cell:
    text = number(estimate.value)
    if estimate.low is None or estimate.high is None:
        return Cell(text=text, verdict=estimate.mark)
    low = number(estimate.low)
    high = number(estimate.high)
    return Cell(text=text, verdict=estimate.mark, low=low, high=high)


def _mebibytes(value: int) -> str:
    return f"{value / 2**20:,.1f}"
