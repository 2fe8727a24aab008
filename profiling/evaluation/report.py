"""Reports of an evaluation, from one table for each length: Markdown, a page, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from artifacts.files import atomic_write
from profiling.evaluation.measure import OUTPUT
from profiling.evaluation.method_table import says
from profiling.evaluation.record import Figures, figures_at, summary_tasks
from profiling.evaluation.rows import MEASURES, PERPLEXITY, SCORE
from profiling.evaluation.summary import BASELINE
from profiling.evaluation.tables import (
    Cell,
    Table,
    build_table,
    column_name,
    entry_of,
    number,
    speedup_of,
)
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


def write_report(out: Path, record: dict[str, Any]) -> None:
    """Add the tables to the record, and write it and its page into a folder."""
    record["tables"] = [asdict(table) for table in _tables(record)]
    content = json.dumps(record, indent=1, allow_nan=False) + "\n"
    atomic_write(out / OUTPUT, content.encode())
    atomic_write(out / PAGE, page(record).encode())


def markdown(record: Mapping[str, Any]) -> str:
    """The report as Markdown: sentences and a table of all methods for each length."""
    blocks = []
    for table in _tables(record):
        blocks.append(f"## {table.length:,} tokens")
        blocks += _sentences(record, table.length)
        blocks.append("\n".join(_lines(table)))
        if any(cell.verdict for row in table.rows.values() for cell in row.values()):
            blocks.append("+ better, - worse than dense beyond chance, ? too few prompts to tell")
    return "\n\n".join([*blocks, *_notes(record)])


def page(record: Mapping[str, Any]) -> str:
    """The report as one HTML file, which needs no network and no script."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(_TEMPLATE)
    tables = _tables(record)
    described = {each["name"]: (each["says"], each["source"]) for each in record["methods"]}
    names = dict.fromkeys(name for table in tables for name in table.rows)
    settings = record["settings"]
    return template.render(
        record=record,
        lengths=[
            {
                "table": table,
                "sentences": _sentences(record, table.length),
                "chart": _chart(record, table),
            }
            for table in tables
        ],
        methods={name: described.get(name) or says(name) for name in names},
        columns={name: text for table in tables for name, text in table.columns.items()},
        seeds=range(settings["seed"], settings["seed"] + settings["seeds"]),
        searches=[f"{name} {seed}" for name, seed in record["artifact"]["seeds"].items()],
        notes=_notes(record),
        environment=[f"{name}: {value}" for name, value in record["environment"].items()],
        marks=_MARKS,
        output=OUTPUT,
    )


def _tables(record: Mapping[str, Any]) -> list[Table]:
    return [build_table(record, length) for length in record["settings"]["lengths"]]


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


def _sentences(record: Mapping[str, Any], length: int) -> list[str]:
    """Seconds to the first token, of attention alone, then accuracy, as far as measured."""
    sentences = []
    if timed := entry_of(record["prefill"], HEADWISE, length):
        sentences.append(
            f"Seconds to the first token of {length:,} tokens: "
            + _seconds(timed["seconds"], speedup_of(timed))
        )
    if alone := entry_of(record["attention"], HEADWISE, length):
        dense = {name: [seconds] for name, seconds in alone["dense"].items()}
        sentences.append(
            "Attention alone, index builds included: "
            + _seconds(alone["seconds"], speedup([alone["seconds"]], dense))
        )
    figures = figures_at(record, length)
    for task, measure in summary_tasks(figures):
        own = figures.get((task, measure, HEADWISE))
        dense_figure = figures.get((task, measure, BASELINE))
        if measure in _NAMES and own and dense_figure and own["difference"] is not None:
            difference = _difference(own, dense_figure)
            sentences.append(f"{_NAMES[measure]} of {task}: {difference}.")
    return sentences


def _seconds(own: float, ratio: Speedup) -> str:
    """Seconds by the fastest dense baseline and by Headwise, with the speed-up."""
    dense = own * ratio.over[ratio.fastest]
    return f"{dense:.3f} {LABELS[ratio.fastest]}, {own:.3f} Headwise, {sentence(ratio)}."


def _difference(own: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    """Both values, the difference with its interval, and the verdict."""
    form = "+.3f"
    units = "questions"
    if MEASURES[own["measure"]].kind == "perplexity":
        form = "+.1%"
        units = "windows"
    interval = "no interval for one unit"
    if own["difference_low"] is not None:
        low, high = (format(own[name], form) for name in ("difference_low", "difference_high"))
        interval = f"95% interval {low} to {high}"
    verdict = own["verdict"] or ("few" if own["few"] else "")
    return (
        f"dense {number(dense['value'])}, Headwise {number(own['value'])} "
        f"of {own['questions']} {units}, "
        f"difference {own['difference']:{form}}, {interval}: {_VERDICTS[verdict]}"
    )


def _notes(record: Mapping[str, Any]) -> list[str]:
    """A sentence for each task with prompts that the search had seen, or with too few."""
    return [
        *(overlap_sentence(**each) for each in record["seen_by_search"]),
        *(fewer_sentence(**each) for each in record["fewer_prompts"]),
    ]


def _with_bounds(estimate: Mapping[str, Any]) -> dict[str, Any]:
    """An estimate whose missing bounds are its value: a bar without width."""
    own = dict(estimate)
    for name in ("low", "high"):
        if own[name] is None:
            own[name] = own["value"]
    return own


def _chart(record: Mapping[str, Any], table: Table) -> dict[str, Any] | None:
    """Positions in percent of each method's value and interval in the first column of a task."""
    figures: Figures = figures_at(record, table.length)
    columns = summary_tasks(figures)
    if not columns:
        return None
    task, measure = columns[0]
    bars = [
        _with_bounds(figures[task, measure, name])
        for name in record["settings"]["methods"]
        if (task, measure, name) in figures
    ]
    low = 0.0
    high = 1.0
    if MEASURES[measure].kind != "score":
        low = min(each["low"] for each in bars)
        high = max(each["high"] for each in bars)

    def percent(value: float) -> float:
        return 100 * (value - low) / (high - low or 1.0)

    column = column_name(task, measure)
    rows = [
        {
            "name": each["method"],
            "left": percent(each["low"]),
            "width": percent(each["high"]) - percent(each["low"]),
            "at": percent(each["value"]),
            "cell": table.rows[each["method"]][column],
        }
        for each in bars
    ]
    return {
        "column": column,
        "low": number(low),
        "high": number(high),
        "rows": rows,
        "dense": next((row for row in rows if row["name"] == BASELINE), None),
    }
