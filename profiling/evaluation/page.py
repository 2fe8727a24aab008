"""Page of an evaluation: one HTML file without network or script; the JSON has every figure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from artifacts.files import atomic_write
from profiling.evaluation.measure import OUTPUT
from profiling.evaluation.method_table import says
from profiling.evaluation.record import (
    as_json,
    attention_of,
    entry,
    figure,
    methods_at,
    named,
    number,
    speedup_of,
    summary_tasks,
)
from profiling.evaluation.rows import ALL, BASELINE, SCORE
from profiling.evaluation.summary import (
    accuracy_sentences,
    other_methods,
    seen_sentences,
    speed_sentences,
)
from profiling.prompts.prompt import KINDS, parse_name
from profiling.speed.baselines import COLUMNS, cells

_TEMPLATE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --muted: #5b6570; --rule: #d8dde3;
  --band: #dce6f2; --dot: #0072b2; --good: #00714f; --bad: #b3400a }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e7eaee; --muted: #9aa5b1;
  --rule: #343b44; --band: #26384d; --dot: #5ab4ef; --good: #4cc79f; --bad: #ff9d66 } }
body { margin: 0 auto; padding: 1rem clamp(.8rem, 4vw, 3rem) 3rem; max-width: 70rem;
  background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.2 }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem }
p, ul, dl { max-width: 46rem; overflow-wrap: anywhere }
dt { font-weight: 600 }
dd { margin: 0 0 .5rem }
small, caption, .muted { color: var(--muted) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .3rem }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule) }
thead th { white-space: normal; vertical-align: bottom }
th:first-child, td:first-child {
  text-align: left; position: sticky; left: 0; background: var(--paper) }
td small { display: block }
.better { color: var(--good) }
.worse { color: var(--bad) }
.row { display: grid; grid-template-columns: 12rem 1fr 4rem; gap: .1rem .6rem; align-items: center;
  max-width: 46rem; font-size: .875rem }
.track { position: relative; height: 1.3rem }
.track * { position: absolute }
.track .band { top: 0; bottom: 0; background: var(--band) }
.track .bar { top: .55rem; height: .2rem; background: var(--muted) }
.track .dot { top: .35rem; width: .6rem; height: .6rem; margin-left: -.3rem; border-radius: 50%;
  background: var(--dot) }
@media (max-width: 34rem) {
  .row { grid-template-columns: 1fr 4rem }
  .row .name { grid-column: 1 / -1 }
}
</style>
<h1>$title</h1>
$sentences
$lengths
<h2>Names</h2>
$names
<h2>Made with</h2>
$made_with
</html>
""")
_COLUMN_NAMES = {
    "first token": "seconds to the first token of a prompt, index builds included",
    "density": "fraction of the causal area that prefill computes, mean over heads",
    "kept": "fraction of the prompt's keys and values that decode attends to",
    COLUMNS[
        0
    ]: "times as fast as the fastest dense baseline: sdpa, or Headwise's kernel over every key",
    COLUMNS[1]: "times as fast as the model's default attention",
    "attention": "seconds of attention alone in one prefill, index builds included",
    "tokens/s": "decoded tokens a second after a prompt of that length",
    "cache": "bytes of keys and values after the prompt",
    "peak": "peak memory of a prefill next to the model",
}


def write_report(out: Path, record: dict[str, Any]) -> None:
    """Write the record and its page into a folder."""
    atomic_write(out / OUTPUT, as_json(record))
    atomic_write(out / "index.html", page(record).encode())


def page(record: dict[str, Any]) -> str:
    """The whole page."""
    return _TEMPLATE.substitute(
        title=f"{escape(record['model']['name'])}: sparse attention vs dense",
        sentences="".join(f"<p>{escape(each)}</p>" for each in _sentences(record)),
        lengths="".join(_length(record, length) for length in record["settings"]["lengths"]),
        names=_names(record),
        made_with=_made_with(record),
    )


def _sentences(record: dict[str, Any]) -> list[str]:
    """Times, accuracy and the verdicts on the other methods at the longest length."""
    length = record["settings"]["lengths"][-1]
    return [
        *speed_sentences(record, length),
        *accuracy_sentences(record, length)[:1],
        *other_methods(record, length),
    ]


def _length(record: dict[str, Any], length: int) -> str:
    return f"<h2>{length:,} tokens</h2>" + _chart(record, length) + _summary(record, length)


def _chart(record: dict[str, Any], length: int) -> str:
    """Draw a row for each method: value and 95% interval of the first column; a band for dense."""
    columns = summary_tasks(record, length)
    if not columns:
        return ""
    task, measure = columns[0]
    figures = [
        figure(record, task, length, name, measure) for name in record["settings"]["methods"]
    ]
    bars = [each for each in figures if each is not None]
    low = 0.0
    high = 1.0
    if measure != SCORE:
        low = min(each["low"] for each in bars)
        high = max(each["high"] for each in bars)

    def percent(value: float) -> float:
        return 100 * (value - low) / (high - low or 1.0)

    def span(kind: str, each: dict[str, Any]) -> str:
        left = percent(each["low"])
        width = percent(each["high"]) - left
        return f'<span class={kind} style="left:{left:.1f}%;width:{width:.1f}%"></span>'

    dense = next((each for each in bars if each["method"] == BASELINE), None)
    if dense:
        band = span("band", dense)
    else:
        band = ""
    rows = [
        f"<div class=row><span class=name>{escape(each['method'])}</span><span "
        f"class=track>{band}{span('bar', each)}"
        f'<span class=dot style="left:{percent(each["value"]):.1f}%"></span></span>'
        f"<span class={each['verdict'] or 'value'}>"
        f"{number(each['value'])}{_mark(each)}</span></div>"
        for each in bars
    ]
    if dense:
        band_says = "; the band is dense attention's"
    else:
        band_says = ""
    says = (
        f"{escape(named(task, measure))} with 95% intervals, "
        f"{number(low)} to {number(high)}{band_says}."
    )
    return (
        f"<figure style='margin:0'>{''.join(rows)}<figcaption "
        f"class=muted>{says}</figcaption></figure>"
    )


def _summary(record: dict[str, Any], length: int) -> str:
    """All methods that have any figure, and the columns that have any."""
    columns = summary_tasks(record, length)
    rows = []
    for made in methods_at(record, length):
        name = made["name"]
        timed = entry(record["prefill"], name, length)
        alone = attention_of(record, name, length)
        decoded = entry(record["decode"], name, length)
        peak = entry(record["memory"], name, length)
        # Empty cells are of what was not measured: a column or a row of them is left out.
        times = [""] * (2 + len(COLUMNS))
        if timed:
            speedups = cells(speedup_of(timed))
            times[:-1] = [f"<td>{timed['seconds']:.3f}", *(f"<td>{cell}" for cell in speedups)]
        if alone:
            times[-1] = f"<td>{alone:.3f}"
        decode = ["", ""]
        if decoded:
            tokens = f"<td>{decoded['tokens_per_second']:.1f}"
            decode = [tokens, f"<td>{_size(decoded['cache_bytes'])}"]
        if peak:
            peak_cell = f"<td>{_size(peak['bytes'])}"
        else:
            peak_cell = ""
        measured = [
            *(_cell(figure(record, task, length, name, measure)) for task, measure in columns),
            *decode,
            peak_cell,
        ]
        if any((*times, *measured)):
            sizes = [f"<td>{number(made[key])}" for key in ("density", "kept")]
            rows.append([f"<td>{escape(name)}", *times, *sizes, *measured])
    head = [
        "method",
        "first token",
        *COLUMNS,
        "attention",
        "density",
        "kept",
        *(named(task, measure) for task, measure in columns),
        "tokens/s",
        "cache",
        "peak",
    ]
    shown = [at for at in range(len(head)) if any(row[at] for row in rows)]
    says = (
        "Beneath each figure its 95% interval. ▲ better, ▼ worse: significantly different from "
        "dense "
        "(Holm-corrected over all comparisons on this page); ?: too few prompts for any mark."
    )
    kept = [[row[at] or "<td>-" for at in shown] for row in rows]
    return _table([head[at] for at in shown], kept, says)


def _cell(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return ""
    bounds = f"<small>{number(figure['low'])} to {number(figure['high'])}</small>"
    return f'<td class="{figure["verdict"]}">{number(figure["value"])}{_mark(figure)}{bounds}'


def _mark(figure: dict[str, Any]) -> str:
    if figure["few"]:
        few = " ?"
    else:
        few = ""
    return {"better": " ▲", "worse": " ▼", "": few}[figure["verdict"]]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table of text heads and HTML cells, each with its opening tag."""
    top = "".join(f"<th scope=col>{escape(cell)}" for cell in head)
    body = "".join("<tr>" + "".join(row) for row in rows)
    return (
        f"<div class=scroll><table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{top}</thead><tbody>{body}</tbody></table></div>"
    )


def _names(record: dict[str, Any]) -> str:
    """Explain each method, task and column in a list of terms."""
    terms: dict[str, str] = {}
    for length in record["settings"]["lengths"]:
        for made in methods_at(record, length):
            description, source = (
                (made["says"], made["source"]) if "says" in made else says(made["name"])
            )
            if source:
                terms[made["name"]] = f"{description} ({source})"
            else:
                terms[made["name"]] = description
    for task in dict.fromkeys(each["task"] for each in record["figures"]):
        kind = KINDS.get(parse_name(task))
        if task == ALL:
            terms[ALL] = "the answers of all tasks together"
        elif kind is not None:
            terms[task] = f"{kind.asks}; scored by {kind.scored}"
    terms |= _COLUMN_NAMES
    return (
        "<dl>"
        + "".join(f"<dt>{escape(name)}<dd>{escape(says)}" for name, says in terms.items())
        + "</dl>"
    )


def _made_with(record: dict[str, Any]) -> str:
    settings = record["settings"]
    seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
    sentences = [f"Prompts of seed {', '.join(map(str, seeds))}."]
    if searches := record["artifact"]["seeds"]:
        sentences[0] += (
            f" Searched with seed: "
            f"{', '.join(f'{name} {seed}' for name, seed in searches.items())}."
        )
    sentences += seen_sentences(record)
    sentences.append(f"Artifact {record['artifact']['content_sha256']}")
    sentences.append(record["command"])
    sentences.append(", ".join(f"{name}: {value}" for name, value in record["environment"].items()))
    sentences.append(f"Every figure is in {OUTPUT}.")
    return "".join(f"<p>{escape(each)}</p>" for each in sentences)


def _size(value: int) -> str:
    return f"{value / 2**20:,.1f} MiB"
