"""The page of an evaluation, and seconds of methods that were timed in other rounds."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from profiling.evaluation.page import page
from profiling.evaluation.record import timed_record
from profiling.evaluation.speed import Timed
from profiling.evaluation.times import Times


def times() -> Times:
    """Two methods of equal cost, one of them timed while the machine was twice as busy."""
    quiet = {"model": (4.0, 4.0, 4.0), "kernel": (2.0, 2.0, 2.0)}
    busy = {name: tuple(2 * value for value in values) for name, values in quiet.items()}
    prefill = {
        ("dense", 64): Timed(seconds=quiet["model"], **quiet),
        ("dense_kernel", 64): Timed(seconds=quiet["kernel"], **quiet),
        ("a_shape", 64): Timed(seconds=(2.0, 2.0, 2.0), **busy),
        ("headwise", 64): Timed(seconds=(1.0, 1.0, 1.0), **quiet),
    }
    attention = {("headwise", 64): {"headwise": 0.25, "dense": 3.0, "dense_kernel": 1.0}}
    return Times(prefill=prefill, attention=attention, decode=prefill, memory={}, crossover=None)


def test_seconds_of_other_rounds_compare() -> None:
    record = timed_record(times())
    seconds = {each["method"]: each["seconds"] for each in record["prefill"]}
    assert seconds == {"a_shape": 1.0, "headwise": 1.0, "dense": 4.0, "dense_kernel": 2.0}
    rates = {each["method"]: each["tokens_per_second"] for each in record["decode"]}
    assert rates["a_shape"] == rates["headwise"] == 1


def figure(method: str, value: float, verdict: str = "", *, few: bool = False) -> dict[str, Any]:
    difference = None if method == "dense" else value - 0.9
    return {
        **{"task": "passkey", "length": 64, "method": method, "measure": "score", "value": value},
        **{
            "low": value - 0.125,
            "high": value + 0.05,
            "count": 20,
            "questions": 166,
            "verdict": verdict,
            "few": few,
        },
        **{"difference": difference, "difference_low": difference, "difference_high": difference},
    }


def record(**changes: Any) -> dict[str, Any]:
    names = ("dense", "headwise", "a_shape", "vertical", "oracle", "no<thing")
    method = {"length": 64, "density": 0.5, "kept": 1.0, "sizes": "", "source": "somebody"}
    return {
        "command": "headwise evaluate",
        "model": {"name": "tiny & small"},
        "artifact": {"content_sha256": "ab" * 32, "seeds": {"headwise": 7}},
        "settings": {"lengths": [64], "methods": list(names), "seed": 5, "seeds": 2},
        "environment": {"torch": "2"},
        "methods": [{"name": name, "says": f"about {name}", **method} for name in names],
        "figures": [
            figure("dense", 0.9),
            figure("headwise", 0.8),
            figure("a_shape", 0.25, "worse"),
            figure("vertical", 0.6, few=True),
            figure("oracle", 0.95, "better"),
        ],
        "measures": [],
        "seen_by_search": [],
        **timed_record(times()),
        **changes,
    }


def cells(html: str) -> list[list[str]]:
    body = html.split("<tbody>")[1].split("</tbody>")[0]
    rows = [re.split(r"<td[^>]*>", row)[1:] for row in body.split("<tr>")[1:]]
    return [[re.sub(r"<small>.*", "", cell) for cell in row] for row in rows]


def test_the_first_token_then_attention_then_accuracy_a_chart_and_a_table() -> None:
    html = page(record())
    said = re.findall(r"<p>(.*?)</p>", html.split("<h2>")[0])
    assert [unescape(each) for each in said] == [
        "Seconds to the first token of 64 tokens: 2.000 dense by Headwise's kernel, 1.000 "
        "Headwise, "
        "2.00 times as fast (2.00 to 2.00) as the fastest dense baseline, "
        "4.00 times as fast (4.00 to 4.00) as default attention (sdpa); "
        "of 3 rounds, too few for an interval of 95%, the least and the most.",
        "Attention alone, index builds included: 1.000 dense by Headwise's kernel, 0.250 Headwise, "
        "4.00 times as fast as the fastest dense baseline, 12.00 times as fast as default "
        "attention (sdpa).",
        "Accuracy of passkey: dense 0.900, Headwise 0.800 of 166 questions, "
        "difference -0.100, 95% interval -0.100 to -0.100: no significant difference.",
        "Of the other methods, by passkey score: better than dense: oracle; worse than dense: "
        "a_shape; "
        "too few prompts to tell: vertical.",
    ]
    # The band is dense attention's interval, each bar a method's own.
    assert html.count('class=band style="left:77.5%;width:17.5%"') == 5
    assert (
        'class=bar style="left:12.5%;width:17.5%"></span><span class=dot style="left:25.0%">'
        in html
    )
    head = re.findall(r"<th scope=col>([^<]*)", html)
    assert head == [
        *("method", "first token", "x fastest dense", "x sdpa", "attention"),
        *("density", "kept", "passkey score", "tokens/s", "cache"),
    ]
    rows = {row[0]: row[1:] for row in cells(html)}
    assert rows["headwise"][:7] == ["1.000", "2.00x", "4.00x", "0.250", "0.500", "1.000", "0.800"]
    assert (
        rows["dense"][3] == "3.000"
        and rows["dense_kernel"][3] == "1.000"
        and rows["a_shape"][3] == "-"
    )
    assert rows["a_shape"][6] == "0.250 ▼" and rows["vertical"][6] == "0.600 ?"
    assert rows["oracle"][0] == "-" and rows["oracle"][6] == "0.950 ▲"


def test_rows_and_columns_without_figures_are_left_out_and_names_are_explained() -> None:
    html = page(record(prefill=[], attention=[], decode=[]))
    assert [row[0] for row in cells(html)] == ["dense", "headwise", "a_shape", "vertical", "oracle"]
    assert re.findall(r"<th scope=col>([^<]*)", html) == [
        "method",
        "density",
        "kept",
        "passkey score",
    ]
    terms = dict(re.findall(r"<dt>([^<]*)<dd>([^<]*)", html))
    assert terms["a_shape"] == "about a_shape (somebody)" and "scored by" in terms["passkey"]
    assert {"no&lt;thing", "density", "kept"} <= set(terms)


def test_the_page_stands_alone_and_says_what_it_was_made_with() -> None:
    left = {"minutes": 30, "what": ["prose at 64 tokens, 4 prompts"]}
    html = page(record(left_out=left))
    assert (
        "tiny &amp; small" in html and '<meta name="viewport" content="width=device-width' in html
    )
    assert not re.search(r"<script|(src|href)=|url\(|@import|http", html)
    assert "Prompts of seed 5, 6. Searched with seed: headwise 7." in html
    assert "Left out of 30 minutes: prose at 64 tokens, 4 prompts." in html
    assert "headwise evaluate" in html and "ab" * 32 in html


def test_a_page_of_texts_alone_has_a_chart_between_its_own_bounds() -> None:
    texts = [
        {**each, "task": "prose", "measure": "perplexity", "value": 10 * each["value"]}
        for each in record()["figures"]
    ]
    texts = [{**each, "low": each["value"] - 1, "high": each["value"] + 1} for each in texts]
    html = page(record(figures=texts))
    assert (
        "Perplexity of prose: dense 9.000, Headwise 8.000 of 166 windows, difference -10.0%" in html
    )
    assert "prose perplexity with 95% intervals, 1.500 to 10.500" in html
