"""Figures of records, and the page: differences are called only where chance is ruled out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from profiling.evaluation.measure import Outcome
from profiling.evaluation.page import page
from profiling.evaluation.record import timed_record
from profiling.evaluation.rows import ALL, KL, NLL, PERPLEXITY, SCORE, curves, figures, grid
from profiling.evaluation.speed import Timed
from profiling.evaluation.times import Times
from profiling.prompts.prompt import Prompt


def outcome(method, scores, task="passkey", depth=None) -> Outcome:
    records = tuple({"text": "", "score": s, "token_accuracy": s, "nll": 2.0 - s} for s in scores)
    return Outcome(task=task, length=100, depth=depth, method=method, records=records)


def text(method, *windows) -> Outcome:
    records = tuple({"blocks": blocks, "forced": blocks[-1]} for blocks in windows)
    return Outcome(task="text:a.txt", length=100, depth=None, method=method, records=records)


def of(found, method, measure, task="passkey"):
    return next(f for f in found if (f.method, f.measure, f.task) == (method, measure, task))


def test_a_difference_is_called_only_where_chance_is_ruled_out():
    right, few, none = [1.0] * 12, [1.0] * 11 + [0.0], [0.0] * 12
    found = figures([outcome("dense", right), outcome("near", few), outcome("far", none)])
    near, far = of(found, "near", SCORE), of(found, "far", SCORE)
    assert near.value == pytest.approx(11 / 12) and near.verdict == "" and near.difference_high >= 0
    assert far.value == 0 and far.verdict == "worse"
    assert far.difference == -1 and far.difference_high < 0
    loss = of(found, "far", NLL)
    assert loss.verdict == "worse" and loss.difference == pytest.approx(1)
    same = figures([text("dense", [1.0] * 9), text("sum", [1.0 + 1e-6] * 9)])
    assert of(same, "sum", PERPLEXITY, "text:a.txt").verdict == ""
    better = figures([outcome("dense", none), outcome("other", right)])
    assert of(better, "other", SCORE).verdict == "better"
    assert of(better, "dense", SCORE).difference is None


def test_tasks_are_pooled_and_depths_are_one_task():
    needles = [outcome("dense", [1, 0], "needle", 0.0), outcome("dense", [1, 1], "needle", 1.0)]
    passkey = outcome("dense", [0, 0], "passkey")
    found = figures([*needles, passkey, text("dense", [1.0, 1.0])])
    needle = of(found, "dense", SCORE, "needle")
    assert (needle.count, needle.value) == (2, 0.75), "the same needle at two depths is one"
    pooled = of(found, "dense", SCORE, ALL)
    assert (pooled.count, pooled.value) == (4, pytest.approx(1.5 / 4))
    assert [(cell.depth, cell.score) for cell in grid(needles)] == [(0.0, 0.5), (1.0, 1.0)]


def test_perplexity_is_that_of_windows_and_its_difference_a_ratio():
    low, high = [[1.0, 2.0], [1.5, 2.5]], [[1.1, 2.1], [1.6, 2.6]]
    found = figures([text("dense", *low), text("sparse", *high)])
    own = of(found, "sparse", PERPLEXITY, "text:a.txt")
    assert own.value == pytest.approx(math.exp(1.85)) and own.count == 2
    assert own.difference == pytest.approx(math.expm1(0.1)) and own.low < own.value < own.high
    (curve,) = curves([text("dense", *low)])
    assert curve.perplexity == pytest.approx((math.exp(1.25), math.exp(2.25)))


def test_questions_of_one_context_are_one_look_at_it():
    scores = [1.0, 0.0, 1.0, 1.0]
    records = tuple({"score": score} for score in scores)
    prompts = tuple(
        Prompt((context, question), "a", turn=1) for context in (1, 2) for question in (3, 4)
    )
    one = replace(outcome("dense", scores), records=records, prompts=prompts)
    (found,) = figures([one])
    assert (found.count, found.value) == (2, 0.75)


def test_how_many_prompts_a_loss_takes_follows_from_the_pairs():
    # Differences -1, 0, 0, 0: a spread of 0.5, and (2.8016 * 0.5 / 0.05)^2.
    found = figures([outcome("dense", [1.0] * 4), outcome("m", [0.0, 1.0, 1.0, 1.0])])
    assert of(found, "m", SCORE).needed == math.ceil((2.80159 * 0.5 / 0.05) ** 2) == 785
    assert of(found, "m", NLL).needed is None and of(found, "dense", SCORE).needed is None
    alone = figures([outcome("dense", [1.0]), outcome("m", [0.0])])
    assert of(alone, "m", SCORE).needed is None, "one prompt has no spread"


def test_many_looks_at_a_table_are_corrected_together():
    # Of 8 pairs all favour dense: p is 2 / 2^8. Three such looks, one a measure, are worse; of
    # seven none is: 7 / 128.
    right, wrong = [1.0] * 8, [0.0] * 8
    outcomes = [outcome("dense", right), outcome("m", wrong)]
    alone = of(figures(outcomes), "m", SCORE)
    assert (alone.p, alone.corrected) == (2 / 256, 3 * 2 / 256)
    assert (alone.verdict, alone.few) == ("worse", False)
    alike = [outcome(name, right) for name in ("n", "o")]
    many = of(figures([*outcomes, *alike]), "m", SCORE)
    # All that a page compares is one family.
    assert (many.corrected, many.verdict, many.few) == (9 / 128, "", True)
    # With three comparisons of more prompts called, three are left to correct the least p of 8 for.
    longer = [outcome("dense", right * 3, "other"), outcome("m", wrong * 3, "other")]
    assert not of(figures([*outcomes, *longer]), "m", SCORE).few
    # Another length and task of the page is a look as well.
    other = [replace(each, task="other", length=200) for each in outcomes]
    assert of(figures([*outcomes, *other]), "m", SCORE).corrected == 6 / 128


def test_a_method_that_ran_on_fewer_prompts_is_paired_with_dense_on_these():
    prompts = tuple(Prompt((number, 7), "a") for number in range(3))

    def some(method, numbers, scores, task):
        records = tuple({"score": score} for score in scores)
        own = tuple(prompts[number] for number in numbers)
        return replace(outcome(method, scores, task), records=records, prompts=own)

    both = [some("dense", (0, 1, 2), [1.0, 0.0, 1.0], task) for task in ("u", "t")]
    found = figures([*both, some("m", (2, 0), [0.0, 1.0], "t")])
    assert of(found, "m", SCORE, "t").difference == -0.5 and of(found, "m", SCORE, "t").count == 2
    assert of(found, "dense", SCORE, "t").count == 3
    pooled = [each.method for each in found if each.task == ALL]
    assert pooled == ["dense"], "a mean of other tasks is no method's of all"


def test_differences_of_each_seed_stand_beside():
    dense, own = outcome("dense", [1.0, 1.0, 0.0, 1.0]), outcome("m", [0.0, 0.0, 0.0, 1.0])
    found = figures([replace(dense, seeds=2), replace(own, seeds=2)])
    assert of(found, "m", SCORE).by_seed == (-1.0, 0.0) and of(found, "dense", SCORE).by_seed == ()
    assert of(figures([dense, own]), "m", SCORE).by_seed == ()


def test_a_divergence_is_a_figure_without_a_test_and_never_below_0():
    near = replace(outcome("m", [1.0, 1.0]), records=({"kl": 0.01}, {"kl": 0.2}))
    found = of(figures([outcome("dense", [1.0, 1.0]), near]), "m", KL)
    assert (found.value, found.low, found.p, found.few) == (pytest.approx(0.105), 0.0, None, False)
    assert found.high > 0.2


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
    return Times(prefill=prefill, attention=attention, decode=prefill, memory={})


def test_seconds_of_other_rounds_compare():
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
        "seen_by_search": [],
        **timed_record(times()),
        **changes,
    }


def cells(html: str) -> list[list[str]]:
    body = html.split("<tbody>")[1].split("</tbody>")[0]
    rows = [re.split(r"<td[^>]*>", row)[1:] for row in body.split("<tr>")[1:]]
    return [[re.sub(r"<small>.*", "", cell) for cell in row] for row in rows]


def test_the_page_has_the_numbers_of_the_record():
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


def test_the_page_stands_alone_and_says_what_it_was_made_with():
    html = page(record())
    assert "tiny &amp; small" in html and "no&lt;thing" in html
    assert not re.search(r"<script|(src|href)=|url\(|@import|http", html)
    assert "Prompts of seed 5, 6. Searched with seed: headwise 7." in html
    assert "headwise evaluate" in html and "ab" * 32 in html
