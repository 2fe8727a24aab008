"""An evaluation as text: seconds to the first token, attention, accuracy, all methods."""

from __future__ import annotations

from typing import Any

from artifacts.page.layout import aligned
from profiling.evaluation.record import (
    attention_of,
    entry,
    figure,
    methods_at,
    named,
    number,
    speedup_of,
    summary_tasks,
)
from profiling.evaluation.rows import BASELINE, PERPLEXITY, SCORE
from profiling.prompts.held_out import overlap_sentence
from profiling.speed.baselines import COLUMNS, HEADWISE, LABELS, Speedup, cells, sentence, speedup

_MEASURES = {SCORE: "Accuracy", PERPLEXITY: "Perplexity"}


def speed_sentences(record: dict[str, Any], length: int) -> list[str]:
    """Say seconds to the first token, then of attention alone, as far as timed."""
    sentences = []
    timed = entry(record["prefill"], HEADWISE, length)
    if timed:
        sentences.append(
            f"Seconds to the first token of {length:,} tokens: "
            + _seconds(timed["seconds"], speedup_of(timed))
        )
    alone = entry(record["attention"], HEADWISE, length)
    if alone:
        dense = {name: [seconds] for name, seconds in alone["dense"].items()}
        ratio = speedup([alone["seconds"]], dense)
        sentences.append(
            "Attention alone, index builds included: " + _seconds(alone["seconds"], ratio)
        )
    return sentences


def _seconds(own: float, ratio: Speedup) -> str:
    """Seconds by the fastest dense baseline and by Headwise, with the speed-up."""
    dense = own * ratio.over[ratio.fastest]
    return f"{dense:.3f} {LABELS[ratio.fastest]}, {own:.3f} Headwise, {sentence(ratio)}."


def accuracy_sentences(record: dict[str, Any], length: int) -> list[str]:
    """Accuracy of dense attention and of Headwise, task by task, as far as both were asked."""
    sentences = []
    for task, measure in summary_tasks(record, length):
        own = figure(record, task, length, HEADWISE, measure)
        dense = figure(record, task, length, BASELINE, measure)
        if measure in _MEASURES and own and dense and own["difference"] is not None:
            sentences.append(f"{_MEASURES[measure]} of {task}: {_difference(own, dense)}.")
    return sentences


def _difference(own: dict[str, Any], dense: dict[str, Any]) -> str:
    perplexity = own["measure"] == PERPLEXITY
    if perplexity:
        form = "+.1%"
    else:
        form = "+.3f"
    fields = ("difference", "difference_low", "difference_high")
    value, low, high = (format(own[name], form) for name in fields)
    if own["few"]:
        alike = "too few to tell it from dense"
    else:
        alike = "no significant difference"
    verdicts = {
        "better": "better than dense",
        "worse": "worse than dense",
        "": alike,
    }
    if perplexity:
        units = "windows"
    else:
        units = "questions"
    return (
        f"dense {number(dense['value'])}, Headwise {number(own['value'])} "
        f"of {own['questions']} {units}, "
        f"difference {value}, 95% interval {low} to {high}: {verdicts[own['verdict']]}"
    )


def other_methods(record: dict[str, Any], length: int) -> list[str]:
    """Verdicts on the other methods, by the first column of the summary."""
    columns = summary_tasks(record, length)
    if not columns:
        return []
    task, measure = columns[0]
    groups: dict[str, list[str]] = {}
    for name in record["settings"]["methods"]:
        entry = figure(record, task, length, name, measure)
        if entry and name not in (BASELINE, HEADWISE) and entry["difference"] is not None:
            verdict = entry["verdict"] or ("few" if entry["few"] else "alike")
            groups.setdefault(verdict, []).append(name)
    words = {
        "better": "better than dense",
        "worse": "worse than dense",
        "alike": "not significantly different",
        "few": "too few prompts to tell",
    }
    parts = [
        f"{words[verdict]}: {', '.join(groups[verdict])}" for verdict in words if verdict in groups
    ]
    if not parts:
        return []
    return [f"Of the other methods, by {named(task, measure)}: {'; '.join(parts)}."]


def seen_sentences(record: dict[str, Any]) -> list[str]:
    """A sentence for each task of which the search had seen prompts."""
    return [overlap_sentence(**each) for each in record["seen_by_search"]]


def shown(figure: dict[str, Any] | None) -> str:
    """Show a figure: value, + or - where better or worse than dense, ? for too few prompts."""
    if figure is None:
        return "-"
    if figure.get("few"):
        none = "?"
    else:
        none = " "
    return number(figure["value"]) + {"better": "+", "worse": "-", "": none}[figure["verdict"]]


def table(record: dict[str, Any]) -> str:
    """The summary as text: sentences and a table of all methods for each length."""
    blocks = []
    for length in record["settings"]["lengths"]:
        sentences = [*speed_sentences(record, length), *accuracy_sentences(record, length)]
        head = f"{length:,} tokens"
        if summary_tasks(record, length):
            head += " (+ better, - worse than dense beyond chance, ? too few prompts to tell)"
        blocks.append("\n".join([*sentences, "", head, *aligned(_rows(record, length))]))
    blocks += seen_sentences(record)
    return "\n\n".join(blocks)


def _rows(record: dict[str, Any], length: int) -> list[list[str]]:
    """A head and a row for each method: its times where any were taken, its sizes, its figures."""
    columns = summary_tasks(record, length)
    timed = any(each["length"] == length for each in record["prefill"])
    if timed:
        times = ["first token s", *COLUMNS, "attention s"]
    else:
        times = []
    tasks = [task if measure == SCORE else f"{task} {measure}" for task, measure in columns]
    rows = [["", *times, "density", "kept", *tasks]]
    for method in methods_at(record, length):
        name = method["name"]
        row = [name]
        if timed:
            own = entry(record["prefill"], name, length)
            if own:
                row += [f"{own['seconds']:.3f}", *cells(speedup_of(own))]
            else:
                row += ["-", *cells(None)]
            row.append(number(attention_of(record, name, length)))
        row += [number(method["density"]), number(method["kept"])]
        row += [shown(figure(record, task, length, name, measure)) for task, measure in columns]
        rows.append(row)
    return rows
