"""The page of an evaluation: one HTML file with its charts and style in it, that needs no network and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from artifacts.files import atomic_write
from profiling.evaluation.fronts import section
from profiling.evaluation.measure import OUTPUT
from profiling.evaluation.record import (
    as_json,
    crossover_sentence,
    figure,
    methods_at,
    nearness,
    speedup_of,
    summary_tasks,
    told_seen,
)
from profiling.evaluation.rows import ALL, BASELINE, MEASURES, PERPLEXITY, SCORE
from profiling.pictures.charts import Bar, Series, heatmap, intervals, legend, lines
from profiling.pictures.page_parts import STYLE, number, plain, size, table
from profiling.speed.baselines import COLUMNS, cells, sentence


def write_report(out: Path, record: dict[str, Any]) -> None:
    """Write the record and its page into a folder."""
    atomic_write(out / OUTPUT, as_json(record))
    atomic_write(out / "index.html", page(record).encode())


def page(record: dict[str, Any]) -> str:
    """The whole page."""
    model = escape(record["model"]["name"])
    parts = [
        f"<h1>{model}: sparse attention beside dense</h1>",
        _in_short(record),
        *[_length(record, length) for length in record["settings"]["lengths"]],
        _nearness(record),
        section(record),
        _needle(record),
        _positions(record),
        _speed(record),
        _methods(record),
        _power(record),
        _all_figures(record),
        _made_with(record),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{model}: evaluation</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _in_short(record: dict[str, Any]) -> str:
    said = []
    for length in record["settings"]["lengths"]:
        columns = summary_tasks(record, length)
        for task, measure in [each for each in columns if each[1] in (SCORE, PERPLEXITY)]:
            pooled = any(each[0] == ALL for each in columns)
            if measure == SCORE and pooled and task != ALL:
                continue
            own, dense = (figure(record, task, length, name, measure) for name in ("headwise", BASELINE))
            if own and dense:
                said.append(f"<li>{length:,} tokens: {_sentence(own, dense, task, measure)}</li>")
        timed = _of(record["prefill"], "headwise", length)
        if timed:
            said.append(
                f"<li>{length:,} tokens: prefill takes {timed['seconds']:.3f} s, {sentence(speedup_of(timed))}; "
                f"{timed['build'] / timed['seconds']:.0%} of it is spent on indices.</li>"
            )
    if record["crossover"]:
        crossover = crossover_sentence(record)
        said.append(f"<li>{escape(crossover[0].upper() + crossover[1:])}.</li>")
    return f"<ul>{''.join(said)}</ul>" if said else ""


def _sentence(own: dict[str, Any], dense: dict[str, Any], task: str, measure: str) -> str:
    none = "too few prompts to tell it from dense" if own.get("few") else "no different from dense beyond chance"
    verdict = {"": none, "better": "better than dense", "worse": "worse than dense"}
    if measure == PERPLEXITY:
        bounds = f"{own['difference_low']:+.1%} to {own['difference_high']:+.1%}"
        return (
            f"Headwise's perplexity on {escape(task)} is {own['value']:.2f} against {dense['value']:.2f} "
            f"({own['difference']:+.1%}, {bounds}): {verdict[own['verdict']]}."
        )
    bounds = f"{own['difference_low']:+.3f} to {own['difference_high']:+.3f}"
    return (
        f"Headwise scores {own['value']:.3f} on {escape(task)} against {dense['value']:.3f} "
        f"(difference {own['difference']:+.3f}, {bounds}, {own['count']} prompts): {verdict[own['verdict']]}."
    )


def _length(record: dict[str, Any], length: int) -> str:
    columns = summary_tasks(record, length)
    names = record["settings"]["methods"]
    head = ["method", "density", "kept", *(_column(*each) for each in columns), "prefill", *COLUMNS]
    rows = []
    for made in methods_at(record, length):
        name = made["name"]
        timed = _of(record["prefill"], name, length)
        rows.append(
            [
                ("text", escape(name)),
                ("", number(made["density"])),
                ("", number(made["kept"])),
                *(_cell(figure(record, task, length, name, measure)) for task, measure in columns),
                ("", f"{timed['seconds']:.3f} s" if timed else "-"),
                *(("", cell) for cell in cells(speedup_of(timed) if timed else None)),
            ]
        )
    summary = table(
        head,
        rows,
        "Beneath each figure: its 95% interval. Coloured and marked: other than dense beyond chance, after Holm's "
        "correction for all looks of this page; ?: too few prompts for any mark.",
    )
    pooled = next((each for each in columns if each[1] == SCORE), None)
    chart = ""
    if pooled:
        found = [figure(record, pooled[0], length, name, SCORE) for name in names]
        bars = [
            Bar(name=f["method"], value=f["value"], low=f["low"], high=f["high"], mark=f["verdict"]) for f in found if f
        ]
        told = f"Score on {escape(pooled[0])} with 95% intervals; the band is that of {escape(bars[0].name)}."
        chart = f"<figure>{intervals(bars, title='Scores')}<figcaption>{told}</figcaption></figure>"
    return f"<h2>{length:,} tokens</h2>{chart}{summary}"


def _nearness(record: dict[str, Any]) -> str:
    told = (
        "Answers inside a prompt and after it whose every token is dense attention's, whether right or wrong; places "
        "whose likeliest token is; KL in nats a token; the share of attention's mass that patterns keep. 95% intervals "
        "over prompts. Dense attention is by Headwise's kernel."
    )
    parts = []
    for length in record["settings"]["lengths"]:
        head, *rows = nearness(record, length) or [[]]
        if rows:
            cells = [[("text", escape(row[0])), *(("", escape(cell)) for cell in row[1:])] for row in rows]
            head = ["method", *(escape(each) for each in head[1:])]
            parts.append(f"<h2>How near to dense attention, {length:,} tokens</h2>{table(head, cells, told)}")
    return "".join(parts)


def _column(task: str, measure: str) -> str:
    return escape(task) if measure == SCORE else f"{escape(task)}<br>{escape(measure)}"


def _cell(found: dict[str, Any] | None) -> tuple[str, str]:
    if found is None:
        return "", "-"
    mark = {"better": " ▲", "worse": " ▼", "": " ?" if found.get("few") else ""}[found["verdict"]]
    return found[
        "verdict"
    ], f"{number(found['value'])}{mark}<small>{number(found['low'])} to {number(found['high'])}</small>"


def _needle(record: dict[str, Any]) -> str:
    cells = record["grid"]
    if not cells:
        return ""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    maps = []
    for name in dict.fromkeys(cell["method"] for cell in cells):
        own = {(cell["depth"], cell["length"]): cell["score"] for cell in cells if cell["method"] == name}
        values = [[own.get((depth, length)) for length in lengths] for depth in depths]
        chart = heatmap(
            values, [f"{depth:.0%}" for depth in depths], [f"{length:,}" for length in lengths], title=f"needle, {name}"
        )
        maps.append(f"<figure><figcaption>{escape(name)}</figcaption>{chart}</figure>")
    count = min(cell["count"] for cell in cells)
    return (
        f"<h2>Needle in a haystack</h2><p class=muted>Score by depth (down) and prompt length (across), "
        f"{count} prompts a cell.</p><div class=maps>{''.join(maps)}</div>"
    )


def _positions(record: dict[str, Any]) -> str:
    charts = []
    for task, length in dict.fromkeys((curve["task"], curve["length"]) for curve in record["curves"]):
        own = [curve for curve in record["curves"] if (curve["task"], curve["length"]) == (task, length)]
        series = [
            Series(name=curve["method"], x=curve["positions"], y=curve["perplexity"], place=at)
            for at, curve in enumerate(own)
        ]
        if len(series[0].x) > 1:
            chart = lines(series, title=f"Perplexity of {task}", x_label="position, tokens", y_label="perplexity")
            charts.append(f"<h3>{escape(task)}, {length:,} tokens</h3>{chart}{legend(series)}")
    return f"<h2>Perplexity by position</h2>{''.join(charts)}" if charts else ""


def _speed(record: dict[str, Any]) -> str:
    if not record["prefill"]:
        return ""
    rows = [
        [
            ("text", escape(each["method"])),
            ("", f"{each['length']:,}"),
            ("", f"{each['seconds']:.3f}"),
            ("", f"{each['build']:.3f}"),
            *(("", cell) for cell in cells(speedup_of(each))),
            ("", str(len(each["rounds"]))),
        ]
        for each in record["prefill"]
    ]
    head = ["method", "tokens", "seconds to the first token", "of which indices", *COLUMNS, "rounds"]
    parts = [
        "<h2>Speed</h2><p class=muted>Every method in turn with dense attention as the model comes (dense) and by "
        "Headwise's kernel (dense_kernel). Ratios are medians of the same rounds; seconds are by them, of one "
        "dense_kernel.</p>",
        table(head, rows, "Prefill"),
    ]
    names = list(dict.fromkeys(each["method"] for each in record["prefill"]))
    series = []
    for at, name in enumerate(names):
        own = sorted((e["length"], e["seconds"]) for e in record["prefill"] if e["method"] == name)
        series.append(Series(name=name, x=[x for x, _ in own], y=[y for _, y in own], place=at))
    if len(record["settings"]["lengths"]) > 1:
        chart = lines(series, title="Prefill", x_label="tokens", y_label="seconds", log=True)
        parts.append(chart + legend(series))
    if record["decode"]:
        rows = [
            [
                ("text", escape(each["method"])),
                ("", f"{each['length']:,}"),
                ("", f"{each['tokens_per_second']:.1f}"),
                *(("", cell) for cell in cells(speedup_of(each))),
                ("", size(each["cache_bytes"])),
            ]
            for each in record["decode"]
        ]
        parts.append(table(["method", "context", "tokens/s", *COLUMNS, "keys and values"], rows, "Decode"))
    if record["memory"]:
        rows = [
            [("text", escape(each["method"])), ("", f"{each['length']:,}"), ("", size(each["bytes"]))]
            for each in record["memory"]
        ]
        parts.append(table(["method", "tokens", "peak"], rows, "Peak memory of a prefill beside the model"))
    if record["crossover"]:
        rows = [[("", f"{length:,}"), ("", f"{speedup:.2f}")] for length, speedup in record["crossover"]["measured"]]
        parts.append(f"<h3>Crossover</h3><p>{escape(crossover_sentence(record))}.</p>")
        parts.append(table(["tokens", COLUMNS[0]], rows, "Lengths that were timed"))
    return "".join(parts)


def _methods(record: dict[str, Any]) -> str:
    rows = [
        [
            ("text", escape(each["name"])),
            ("", f"{each['length']:,}"),
            ("", number(each["density"])),
            ("text", escape(each["says"])),
            ("text", escape(each["sizes"])),
            ("text", escape(each["source"])),
        ]
        for each in record["methods"]
    ]
    head = ["method", "tokens", "density", "what it is", "sizes", "source"]
    return (
        f"<h2>Methods</h2>{table(head, rows, 'Density: share of the causal area that is computed, mean over heads.')}"
    )


def _power(record: dict[str, Any]) -> str:
    """How many prompts of each task tell a loss of 5 points, beside how many there were; by the least alike method."""
    most: dict[tuple[str, int, str], dict[str, Any]] = {}
    for each in record["figures"]:
        place = each["task"], each["length"], each["measure"]
        if each.get("needed") is not None and (place not in most or most[place]["needed"] < each["needed"]):
            most[place] = each
    rows = [
        [
            ("text", escape(task)),
            ("", f"{length:,}"),
            ("text", escape(measure)),
            ("", str(each["count"])),
            ("", f"{each['needed']:,}"),
            ("text", escape(each["method"])),
        ]
        for (task, length, measure), each in most.items()
    ]
    head = ["task", "tokens", "measure", "prompts", "needed", "for"]
    told = "Prompts, or contexts, that tell a loss of 5 points at 95% in 80% of runs, by how unlike dense a method was."
    return f"<h2>How many prompts it takes</h2>{table(head, rows, told)}" if rows else ""


def _all_figures(record: dict[str, Any]) -> str:
    seeded = any(each.get("by_seed") for each in record["figures"])
    rows = [
        [
            ("text", escape(each["task"])),
            ("", f"{each['length']:,}"),
            ("text", escape(each["method"])),
            ("text", escape(each["measure"])),
            _cell(each),
            ("", _difference(each)),
            *([("", _by_seed(each))] if seeded else []),
            ("", str(each["count"])),
        ]
        for measure in MEASURES
        for each in record["figures"]
        if each["measure"] == measure
    ]
    head = ["task", "tokens", "method", "measure", "value", "less dense", *(["by seed"] if seeded else []), "count"]
    told = "95% intervals: Wilson's for right and wrong answers, else Student's; differences are of pairs."
    return f"<details><summary>Every figure</summary>{table(head, rows, told)}</details>"


def _difference(each: dict[str, Any]) -> str:
    if each["difference"] is None:
        return "-"
    kind = _form(each)
    low, high = (format(each[name], kind) for name in ("difference_low", "difference_high"))
    return f"{format(each['difference'], kind)}<small>{low} to {high}</small>"


def _by_seed(each: dict[str, Any]) -> str:
    return ", ".join(format(value, _form(each)) for value in each["by_seed"]) or "-"


def _form(each: dict[str, Any]) -> str:
    """How its differences are written."""
    return "+.1%" if each["measure"].startswith(PERPLEXITY) else "+.3f"


def _made_with(record: dict[str, Any]) -> str:
    told = {**record["environment"], **record["settings"]}
    items = "".join(f"<li>{escape(str(key))}: {escape(plain(value))}</li>" for key, value in told.items())
    digest = escape(str(record["artifact"]["content_sha256"]))
    left = record.get("left_out", {"what": []})
    missing = (
        f"<p>Left out of {left['minutes']:g} minutes: {escape('; '.join(left['what']))}.</p>" if left["what"] else ""
    )
    notes = missing + _seeds(record) + "".join(f"<p>{escape(note)}</p>" for note in told_seen(record))
    return (
        f"{notes}<h2>Made with</h2><p><code>{escape(record['command'])}</code></p><p>Artifact <code>{digest}</code></p>"
        f"<details><summary>Machine, packages and settings</summary><ul>{items}</ul></details>"
    )


def _seeds(record: dict[str, Any]) -> str:
    """Which seeds prompts and searches are of; earlier versions kept those of prompts alone."""
    first, count = record["settings"]["seed"], record["settings"].get("seeds", 1)
    said = f"Prompts of seed {', '.join(str(seed) for seed in range(first, first + count))}."
    searches = record["artifact"].get("seeds", {})
    if searches:
        said += f" Searched with seed: {', '.join(f'{name} {seed}' for name, seed in searches.items())}."
    return f"<p>{escape(said)}</p>"


def _of(entries: Sequence[dict[str, Any]], name: str, length: int, key: str = "method") -> dict[str, Any] | None:
    return next((each for each in entries if each[key] == name and each["length"] == length), None)
