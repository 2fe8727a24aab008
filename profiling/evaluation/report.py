"""Reports of an evaluation, from one table for each length: Markdown, a page, and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from artifacts.files import atomic_write
from profiling.evaluation.measure import OUTPUT
from profiling.evaluation.method_table import says
from profiling.evaluation.record import Record, as_json
from profiling.evaluation.rows import MEASURES, PERPLEXITY, SCORE
from profiling.evaluation.summary import BASELINE, Estimate
from profiling.evaluation.tables import Cell, Table, build_table, column_name, number
from profiling.evaluation.times import row_of
from profiling.prompts.held_out import overlap_sentence
from profiling.prompts.prompt import fewer_sentence
from profiling.speed.baselines import HEADWISE, LABELS, Speedup, sentence, speedup

PAGE = "index.html"
_TEMPLATE = "page.html.j2"
_NAMES = {SCORE: "Accuracy", PERPLEXITY: "Perplexity"}
_MARKS = {"better": "+", "worse": "-", "few": "?", "": ""}
_VERDICTS = {
    "better": "better than dense",
    "worse": "worse than dense",
    "few": "too few prompts to tell from dense",
    "": "no significant difference",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A record with its table at each length."""

    record: Record
    tables: tuple[Table, ...]

    @classmethod
    def of(cls, record: Record) -> Self:
        """Build the tables."""
        tables = (build_table(record, length) for length in record.lengths)
        return cls(record=record, tables=tuple(tables))

    def as_json(self) -> dict[str, Any]:
        """The content of evaluation.json."""
        return {**as_json(self.record), "tables": [asdict(table) for table in self.tables]}

    def write(self, out: Path) -> dict[str, Any]:
        """Write evaluation.json and the page into a folder; return the former."""
        content = self.as_json()
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        atomic_write(out / OUTPUT, text.encode())
        atomic_write(out / PAGE, page(self).encode())
        return content


def markdown(report: Report) -> str:
    """The report as Markdown: sentences and a table of all methods for each length."""
    blocks = []
    for table in report.tables:
        blocks.append(f"## {table.length:,} tokens")
        blocks += _sentences(report.record, table.length)
        blocks.append("\n".join(_lines(table)))
        if any(cell.verdict for row in table.rows.values() for cell in row.values()):
            blocks.append("+ better, - worse than dense beyond chance, ? too few prompts to tell")
    return "\n\n".join([*blocks, *_notes(report.record)])


def page(report: Report) -> str:
    """The report as one HTML file, which needs no network and no script."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(_TEMPLATE)
    record = report.record
    described = {each.name: (each.says, each.source) for each in record.methods}
    names = dict.fromkeys(name for table in report.tables for name in table.rows)
    first = record.config.seed
    return template.render(
        record=record,
        model=record.artifact.model.name,
        lengths=[
            {
                "table": table,
                "sentences": _sentences(record, table.length),
                "chart": _chart(record, table),
            }
            for table in report.tables
        ],
        methods={name: described.get(name) or says(name) for name in names},
        columns={name: text for table in report.tables for name, text in table.columns.items()},
        seeds=range(first, first + record.config.seeds),
        searches=[f"{name} {seed}" for name, seed in record.seeds.items()],
        notes=_notes(record),
        environment=[f"{name}: {value}" for name, value in record.environment.items()],
        marks=_MARKS,
        output=OUTPUT,
    )


def _lines(table: Table) -> list[str]:
    """Lines of a table in Markdown, padded so that it reads on a terminal."""
    rows = [["method", *table.columns]]
    for name, row in table.rows.items():
        cells = [row.get(column, Cell(text="-")) for column in table.columns]
        rows.append([name, *(cell.text + _MARKS[cell.verdict] for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| "
        + " | ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        + " |"
        for row in rows
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]


def _sentences(record: Record, length: int) -> list[str]:
    """Seconds to the first token, of attention alone, then accuracy, as far as measured."""
    sentences = []
    if timed := row_of(record.times.prefill, HEADWISE, length):
        sentences.append(
            f"Seconds to the first token of {length:,} tokens: "
            + _seconds(timed.seconds, timed.timed.speedup)
        )
    if alone := row_of(record.times.attention, HEADWISE, length):
        dense = {name: [seconds] for name, seconds in alone.dense.items()}
        sentences.append(
            "Attention alone, index builds included: "
            + _seconds(alone.seconds, speedup([alone.seconds], dense))
        )
    for task, measure in record.columns(length):
        own = record.estimate(task, measure, HEADWISE, length)
        baseline = record.estimate(task, measure, BASELINE, length)
        if measure in _NAMES and own and baseline and own.difference is not None:
            sentences.append(f"{_NAMES[measure]} of {task}: {_difference(own, baseline)}.")
    return sentences


def _seconds(own: float, ratio: Speedup) -> str:
    """Seconds by the fastest dense baseline and by Headwise, with the speed-up."""
    dense = own * ratio.over[ratio.fastest]
    return f"{dense:.3f} {LABELS[ratio.fastest]}, {own:.3f} Headwise, {sentence(ratio)}."


def _difference(own: Estimate, dense: Estimate) -> str:
    """Both values, the difference with its interval, and the verdict."""
    form = "+.3f"
    units = "questions"
    if MEASURES[own.measure].kind == "perplexity":
        form = "+.1%"
        units = "windows"
    interval = "no interval for one unit"
    if own.difference_low is not None and own.difference_high is not None:
        interval = f"95% interval {own.difference_low:{form}} to {own.difference_high:{form}}"
    return (
        f"dense {number(dense.value)}, Headwise {number(own.value)} "
        f"of {own.questions} {units}, "
        f"difference {own.difference:{form}}, {interval}: {_VERDICTS[own.mark]}"
    )


def _notes(record: Record) -> list[str]:
    """A sentence for each task with prompts that the search had seen, or with too few."""
    return [
        *(overlap_sentence(each) for each in record.seen_by_search),
        *(fewer_sentence(each) for each in record.fewer_prompts),
    ]


def _bounds(estimate: Estimate) -> tuple[float, float]:
    """The interval; of one unit its value, a bar without width."""
    if estimate.low is None or estimate.high is None:
        return estimate.value, estimate.value
    return estimate.low, estimate.high


def _chart(record: Record, table: Table) -> dict[str, Any] | None:
    """Positions in percent of each method's value and interval in the first column of a task."""
    columns = record.columns(table.length)
    if not columns:
        return None
    task, measure = columns[0]
    at_length = [
        record.estimate(task, measure, name, table.length) for name in record.config.methods
    ]
    bars = [(each, *_bounds(each)) for each in at_length if each is not None]
    low = 0.0
    high = 1.0
    if MEASURES[measure].kind != "score":
        low = min(least for _, least, _ in bars)
        high = max(most for _, _, most in bars)

    def percent(value: float) -> float:
        return 100 * (value - low) / (high - low or 1.0)

    column = column_name(task, measure)
    rows = [
        {
            "name": each.method,
            "left": percent(least),
            "width": percent(most) - percent(least),
            "at": percent(each.value),
            "cell": table.rows[each.method][column],
        }
        for each, least, most in bars
    ]
    return {
        "column": column,
        "low": number(low),
        "high": number(high),
        "rows": rows,
        "dense": next((row for row in rows if row["name"] == BASELINE), None),
    }
