"""The page of an evaluation, and seconds of methods that were timed in other rounds."""

from __future__ import annotations

import re
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
    bounds = {"low": value - 0.125, "high": value + 0.05}
    bounds |= dict.fromkeys(("difference", "difference_low", "difference_high"), difference)
    of = {"task": "passkey", "length": 64, "method": method, "measure": "score", "value": value}
    return {**of, **bounds, "count": 20, "questions": 166, "verdict": verdict, "few": few}


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


def test_the_page_has_the_numbers_of_the_record() -> None:
    html = page(record())
    first, attention, accuracy, others = re.findall(r"<p>(.*?)</p>", html.split("<h2>")[0])
    assert "2.00 times as fast (2.00 to 2.00) as the fastest dense baseline" in first
    assert "4.00 times as fast (4.00 to 4.00) as default attention" in first
    assert "0.250 Headwise, 4.00 times" in attention and "12.00 times" in attention
    assert "dense 0.900, Headwise 0.800 of 166 questions, difference -0.100" in accuracy
    for part in ("better than dense: oracle", "worse than dense: a_shape", "to tell: vertical"):
        assert part in others
    # The band is dense attention's interval, each bar a method's own.
    assert html.count('class=band style="left:77.5%;width:17.5%"') == 5
    assert (
        'class=bar style="left:12.5%;width:17.5%"></span><span class=dot style="left:25.0%' in html
    )
    head = re.findall(r"<th scope=col>([^<]*)", html)
    assert head == [
        *("method", "first token", "x fastest dense", "x sdpa", "attention"),
        *("density", "kept", "passkey score", "tokens/s", "cache"),
    ]
    rows = {row[0]: row[1:] for row in cells(html)}
    assert rows["headwise"][:7] == ["1.000", "2.00x", "4.00x", "0.250", "0.500", "1.000", "0.800"]
    attention = [rows[name][3] for name in ("dense", "dense_kernel", "a_shape")]
    assert attention == ["3.000", "1.000", "-"]
    marked = [rows[name][6] for name in ("a_shape", "vertical", "oracle")]
    assert marked == ["0.250 ▼", "0.600 ?", "0.950 ▲"] and rows["oracle"][0] == "-"


def test_the_page_stands_alone_and_says_what_it_was_made_with() -> None:
    left = {"minutes": 30, "what": ["prose at 64 tokens, 4 prompts"]}
    html = page(record(left_out=left))
    assert "tiny &amp; small" in html and "no&lt;thing" in html
    assert not re.search(r"<script|(src|href)=|url\(|@import|http", html)
    assert "Prompts of seed 5, 6. Searched with seed: headwise 7." in html
    assert "Left out of 30 minutes: prose at 64 tokens, 4 prompts." in html
    assert "headwise evaluate" in html and "ab" * 32 in html
