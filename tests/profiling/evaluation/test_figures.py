"""Estimates from rows, and the reports: verdicts only where chance is ruled out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from artifacts import Artifact, ModelInfo, Prefill
from profiling.evaluation.config import Evaluation
from profiling.evaluation.record import MethodRow, Record, as_json
from profiling.evaluation.report import Report, markdown, page
from profiling.evaluation.rows import ACCURACY, KL, NLL, PERPLEXITY, SCORE, Row, rows_of
from profiling.evaluation.speed import Timed
from profiling.evaluation.summary import ALL, Estimate, curves, grid, summarize
from profiling.evaluation.times import AttentionRow, Times, time_rows


def rows(method, records, task="passkey", depth=None, length=100, seeds=1, units=None) -> list[Row]:
    """Rows of trials' records, each each a separate unit if `units` is None."""
    new_rows = []
    for at, record in enumerate(records):
        new_rows += rows_of(
            record,
            task=task,
            length=length,
            method=method,
            prompt=f"{depth}/{at}",
            unit=f"{task}/{units[at] if units else at}",
            seed=at // (len(records) // seeds),
            questions=1,
            depth=depth,
        )
    return new_rows


def scored(method, scores, task="passkey", **more) -> list[Row]:
    records = [{"text": "", "score": s, "token_accuracy": s, "nll": 2.0 - s} for s in scores]
    return rows(method, records, task, **more)


def text(method, *windows, tokens=None) -> list[Row]:
    """Rows of windows by the mean losses of their blocks, each of one token if `tokens` is None."""
    records = [
        {"blocks": blocks, "block_tokens": tokens or [1] * len(blocks), "forced": blocks[-1]}
        for blocks in windows
    ]
    return rows(method, records, "text:a.txt")


def of(result, method, measure, task="passkey", length=100):
    wanted = (method, measure, task, length)
    return next(f for f in result if (f.method, f.measure, f.task, f.length) == wanted)


def test_summarize_gives_a_verdict_only_if_significant():
    right, few, none = [1.0] * 12, [1.0] * 11 + [0.0], [0.0] * 12
    result = summarize(scored("dense", right) + scored("near", few) + scored("far", none))
    near, far = of(result, "near", SCORE), of(result, "far", SCORE)
    assert near.value == pytest.approx(11 / 12) and near.verdict == "" and near.difference_high >= 0
    assert far.value == 0 and far.verdict == "worse"
    assert far.difference == -1 and far.difference_high < 0
    loss = of(result, "far", NLL)
    assert loss.verdict == "worse" and loss.difference == pytest.approx(1)
    same = summarize(text("dense", *[[1.0]] * 9) + text("sum", *[[1.0 + 1e-6]] * 9))
    assert of(same, "sum", PERPLEXITY, "text:a.txt").verdict == ""
    better = summarize(scored("dense", none) + scored("other", right))
    assert of(better, "other", SCORE).verdict == "better"
    assert of(better, "dense", SCORE).difference is None


def test_summarize_pools_tasks_and_depths():
    needles = scored("dense", [1, 0], "needle", depth=0.0)
    needles += scored("dense", [1, 1], "needle", depth=1.0)
    passkey = scored("dense", [0, 0], "passkey")
    result = summarize([*needles, *passkey, *text("dense", [1.0], [1.0])])
    needle = of(result, "dense", SCORE, "needle")
    assert (needle.count, needle.value) == (2, 0.75), "the same needle at two depths is one"
    pooled = of(result, "dense", SCORE, ALL)
    assert (pooled.count, pooled.value) == (4, pytest.approx(1.5 / 4))
    assert [(cell.depth, cell.score) for cell in grid(needles)] == [(0.0, 0.5), (1.0, 1.0)]


def test_summarize_perplexity_of_windows_and_its_ratio():
    low, high = [[1.0, 2.0], [1.5, 2.5]], [[1.1, 2.1], [1.6, 2.6]]
    result = summarize(text("dense", *low) + text("sparse", *high))
    own = of(result, "sparse", PERPLEXITY, "text:a.txt")
    assert own.value == pytest.approx(math.exp(1.85)) and own.count == 2
    assert own.difference == pytest.approx(math.expm1(0.1)) and own.low < own.value < own.high
    (curve,) = curves(text("dense", *low))
    assert curve.perplexity == pytest.approx((math.exp(1.25), math.exp(2.25)))


def test_summarize_perplexity_weights_every_token_alike():
    """1,535 losses of 1 and 512 of 3, of which the last block has 511."""
    blocks = [1.0] * 5 + [(255 + 3) / 256, 3.0]
    own = text("dense", blocks, tokens=[256] * 6 + [511])
    (estimate,) = (each for each in summarize(own) if each.measure == PERPLEXITY)
    assert math.log(estimate.value) == pytest.approx((1535 + 3 * 512) / 2047)
    (curve,) = curves(own)
    assert curve.positions == (128, 384, 640, 896, 1152, 1408, 1536 + 255)


def test_summarize_questions_of_one_context_are_one_unit():
    records = [{"score": score} for score in (1.0, 0.0, 1.0, 1.0)]
    (result,) = summarize(rows("dense", records, units=(0, 0, 1, 1)))
    assert (result.count, result.value) == (2, 0.75)


def test_summarize_without_a_measure_on_every_prompt_omits_it():
    window = {"blocks": [1.0], "block_tokens": [1]}
    records = [{"score": 1.0, "nll": 1.0}, {"score": 0.0, "nll": None}, window]
    result = summarize(rows("dense", records[:2]) + rows("dense", records, "jsonl:a"))
    assert [(each.task, each.measure) for each in result] == [("passkey", SCORE)]


def test_summarize_counts_the_prompts_needed():
    # Differences -1, 0, 0, 0: a spread of 0.5, and (2.8016 * 0.5 / 0.05)^2.
    result = summarize(scored("dense", [1.0] * 4) + scored("m", [0.0, 1.0, 1.0, 1.0]))
    assert of(result, "m", SCORE).needed == math.ceil((2.80159 * 0.5 / 0.05) ** 2) == 785
    assert of(result, "m", NLL).needed is None and of(result, "dense", SCORE).needed is None
    alone = summarize(scored("dense", [1.0]) + scored("m", [0.0]))
    assert of(alone, "m", SCORE).needed is None, "one prompt has no spread"


def test_summarize_corrects_all_comparisons_together():
    # Of 8 pairs all favour dense: p is 2 / 2^8. Three such comparisons, one a measure, are worse;
    # of seven none is: 7 / 128.
    right, wrong = [1.0] * 8, [0.0] * 8
    own = scored("dense", right) + scored("m", wrong)
    alone = of(summarize(own), "m", SCORE)
    assert (alone.p, alone.corrected) == (2 / 256, 3 * 2 / 256)
    assert (alone.verdict, alone.few) == ("worse", False)
    alike = scored("n", right) + scored("o", right)
    many = of(summarize(own + alike), "m", SCORE)
    # All that a page compares is one family.
    assert (many.corrected, many.verdict, many.few) == (9 / 128, "", True)
    # With three comparisons of more prompts called, three are left to correct the least p of 8 for.
    longer = scored("dense", right * 3, "other") + scored("m", wrong * 3, "other")
    assert not of(summarize(own + longer), "m", SCORE).few
    # Another length and task of the page is a comparison as well.
    other = scored("dense", right, "other", length=200) + scored("m", wrong, "other", length=200)
    assert of(summarize(own + other), "m", SCORE).corrected == 6 / 128


def test_summarize_pairs_a_method_with_dense_on_its_prompts():
    def some(method, units, scores, task):
        return rows(method, [{"score": score} for score in scores], task, units=units)

    both = [*some("dense", (0, 1, 2), [1.0, 0.0, 1.0], "u")]
    both += some("dense", (0, 1, 2), [1.0, 0.0, 1.0], "t")
    result = summarize([*both, *some("m", (2, 0), [0.0, 1.0], "t")])
    assert of(result, "m", SCORE, "t").difference == -0.5 and of(result, "m", SCORE, "t").count == 2
    assert of(result, "dense", SCORE, "t").count == 3
    pooled = [each.method for each in result if each.task == ALL]
    assert pooled == ["dense"], "a mean of other tasks is no method's of all"


def test_summarize_differences_by_seed():
    def result(seeds):
        dense = scored("dense", [1.0, 1.0, 0.0, 1.0], seeds=seeds)
        return summarize(dense + scored("m", [0.0, 0.0, 0.0, 1.0], seeds=seeds))

    two = result(2)
    assert of(two, "m", SCORE).by_seed == (-1.0, 0.0) and of(two, "dense", SCORE).by_seed == ()
    assert of(result(1), "m", SCORE).by_seed == ()


def test_summarize_kl_has_no_p_value_and_is_not_negative():
    near = rows("m", [{"kl": 0.01}, {"kl": 0.2}])
    result = of(summarize(scored("dense", [1.0, 1.0]) + near), "m", KL)
    assert (result.value, result.low, result.p, result.few) == (
        pytest.approx(0.105),
        0.0,
        None,
        False,
    )
    assert result.high > 0.2


def test_summarize_token_accuracy_is_a_score():
    result = summarize(scored("dense", [1.0] * 4))
    assert of(result, "dense", ACCURACY).low > 0


def times() -> Times:
    """Two methods of equal cost, one of them timed while the machine was twice as busy."""
    quiet = {"model": (4.0, 4.0, 4.0), "kernel": (2.0, 2.0, 2.0)}
    busy = {name: tuple(2 * value for value in values) for name, values in quiet.items()}
    rounds = {
        "dense": Timed(seconds=quiet["model"], **quiet),
        "dense_kernel": Timed(seconds=quiet["kernel"], **quiet),
        "a_shape": Timed(seconds=(2.0, 2.0, 2.0), **busy),
        "headwise": Timed(seconds=(1.0, 1.0, 1.0), **quiet),
    }
    rows = tuple(time_rows(rounds, 64))
    dense = {"dense": 3.0, "dense_kernel": 1.0}
    alone = AttentionRow(method="headwise", length=64, seconds=0.25, dense=dense)
    return Times(prefill=rows, attention=(alone,), decode=rows)


def test_time_rows_compare_methods_of_different_rounds():
    seconds = {row.method: row.seconds for row in times().prefill}
    assert seconds == {"a_shape": 1.0, "headwise": 1.0, "dense": 4.0, "dense_kernel": 2.0}
    plain = as_json(record())
    assert {each["method"]: each["seconds"] for each in plain["prefill"]} == seconds
    rates = {each["method"]: each["tokens_per_second"] for each in plain["decode"]}
    assert rates["a_shape"] == rates["headwise"] == 1


def figure(method: str, value: float, verdict: str = "", *, few: bool = False) -> Estimate:
    difference = None if method == "dense" else value - 0.9
    return Estimate(
        task="passkey",
        length=64,
        method=method,
        measure="score",
        value=value,
        low=value - 0.125,
        high=value + 0.05,
        difference=difference,
        difference_low=difference,
        difference_high=difference,
        count=20,
        questions=166,
        verdict=verdict,
        few=few,
    )


METHODS = ("dense", "headwise", "a_shape", "vertical", "oracle", "no<thing")


def about(name: str) -> MethodRow:
    return MethodRow(
        name=name,
        length=64,
        density=0.5,
        kept=1.0,
        sizes="",
        says=f"about {name}",
        source="somebody",
        identity=name,
    )


def record(**changes: Any) -> Record:
    model = ModelInfo.model_construct(name="tiny & small", weights_sha256="0" * 64)
    artifact = Artifact.model_construct(
        model=model, content_sha256="ab" * 32, prefill=Prefill(dense_below=0, layers=(None,))
    )
    whole = Record(
        command="headwise evaluate",
        artifact=artifact,
        seeds={"headwise": 7},
        config=Evaluation(lengths=(64,), methods=METHODS, seed=5, seeds=2),
        device="cpu",
        dtype="float32",
        environment={"torch": "2"},
        methods=tuple(map(about, METHODS)),
        estimates=(
            figure("dense", 0.9),
            figure("headwise", 0.8),
            figure("a_shape", 0.25, "worse"),
            figure("vertical", 0.6, few=True),
            figure("oracle", 0.95, "better"),
        ),
        times=times(),
    )
    return replace(whole, **changes)


def page_of(record: Record) -> str:
    return page(Report.of(record))


def cells(html: str) -> dict[str, list[str]]:
    """Cells of the table by method, without intervals."""
    body = html.split("<tbody>")[1].split("</tbody>")[0]
    result = {}
    for row in body.split("<tr>")[1:]:
        name = re.findall(r'<th scope="row">(.*?)</th>', row)[0]
        result[name] = re.findall(r"<td[^>]*>([^<]*)", row)
    return result


COLUMNS = [
    *("first token s", "x fastest dense", "x sdpa", "attention s", "density", "kept", "passkey"),
    *("ms/token", "cache MiB"),
]
VALUES = ["1.000", "2.00x", "4.00x", "0.250", "0.500", "1.000", "0.800"]


def test_page_has_the_numbers_of_the_record():
    html = page_of(record())
    first, attention, accuracy = re.findall(r"<p>(.*?)</p>", html)[:3]
    assert "2.00 times as fast (2.00 to 2.00) as the fastest dense baseline" in first
    assert "4.00 times as fast (4.00 to 4.00) as default attention" in first
    assert "0.250 Headwise, 4.00 times" in attention and "12.00 times" in attention
    assert "dense 0.900, Headwise 0.800 of 166 questions, difference -0.100" in accuracy
    assert re.findall(r'<th scope="col">([^<]*)', html) == ["method", *COLUMNS]
    result = cells(html)
    assert result["headwise"][:7] == VALUES
    dense = [result[name][3] for name in ("dense", "dense_kernel", "a_shape")]
    assert dense == ["3.000", "1.000", "-"]
    marked = [result[name][6] for name in ("a_shape", "vertical", "oracle")]
    assert marked == ["0.250-", "0.600?", "0.950+"] and result["oracle"][0] == "-"
    assert "no&lt;thing" not in html, "nothing was measured"


def test_markdown_has_the_same_table():
    lines = markdown(Report.of(record())).splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    assert rows[0] == ["method", *COLUMNS]
    result = {row[0]: row[1:] for row in rows[2:]}
    html = cells(page_of(record()))
    assert result == html and result["headwise"][:7] == VALUES
    assert lines[0] == "## 64 tokens" and lines[2].startswith("Seconds to the first token")


def test_reports_of_one_unit_show_no_interval_unless_all_right_or_wrong():
    """One unit says nothing of the spread; Wilson's and Newcombe's formulas need none."""
    for score, has_one in ((0.5, False), (1.0, True)):
        estimates = summarize(scored("dense", [1.0]) + scored("headwise", [score]))
        wanted = [replace(e, length=64) for e in estimates if e.measure == SCORE]
        html = page_of(record(estimates=tuple(wanted)))
        assert ("no interval for one unit" in html) != has_one
        row = html.split('<th scope="row">headwise</th>')[1].split("</tr>")[0]
        assert ("<small>" in row) == has_one


def test_page_needs_nothing_else_and_names_its_setup():
    estimates = record().estimates
    last = replace(estimates[-1], method="no<thing")
    html = page_of(record(estimates=(*estimates[:-1], last)))
    assert "tiny &amp; small" in html and "no&lt;thing" in html and "about no&lt;thing" in html
    assert not re.search(r"<script|(src|href)=|url\(|@import|http", html)
    assert "Prompts of seed 5, 6. Searched with seed: headwise 7." in html
    assert "headwise evaluate" in html and "ab" * 32 in html
