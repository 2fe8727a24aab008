"""Figures from records: means, intervals and differences that are called only outside of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from profiling.evaluation.measure import Outcome, as_dense
from profiling.evaluation.rows import ALL, KL, NLL, PERPLEXITY, SCORE, curves, figures, grid
from profiling.prompts.prompt import Prompt


def outcome(
    method: str, scores: list[float], task: str = "passkey", depth: float | None = None
) -> Outcome:
    records = tuple({"text": "", "score": s, "token_accuracy": s, "nll": 2.0 - s} for s in scores)
    return Outcome(task=task, length=100, depth=depth, method=method, records=records)


def text(method: str, *windows: list[float]) -> Outcome:
    records = tuple({"blocks": blocks, "forced": blocks[-1]} for blocks in windows)
    return Outcome(task="text:a.txt", length=100, depth=None, method=method, records=records)


def of(found: list[Any], method: str, measure: str, task: str = "passkey") -> Any:
    return next(f for f in found if (f.method, f.measure, f.task) == (method, measure, task))


def test_a_difference_is_called_only_where_chance_is_ruled_out() -> None:
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


def test_tasks_are_pooled_and_depths_are_one_task() -> None:
    needles = [outcome("dense", [1, 0], "needle", 0.0), outcome("dense", [1, 1], "needle", 1.0)]
    passkey = outcome("dense", [0, 0], "passkey")
    found = figures([*needles, passkey, text("dense", [1.0, 1.0])])
    needle = of(found, "dense", SCORE, "needle")
    assert (needle.count, needle.value) == (2, 0.75), "the same needle at two depths is one"
    pooled = of(found, "dense", SCORE, ALL)
    assert (pooled.count, pooled.value) == (4, pytest.approx(1.5 / 4))
    assert [(cell.depth, cell.score) for cell in grid(needles)] == [(0.0, 0.5), (1.0, 1.0)]


def test_perplexity_is_that_of_windows_and_its_difference_a_ratio() -> None:
    low, high = [[1.0, 2.0], [1.5, 2.5]], [[1.1, 2.1], [1.6, 2.6]]
    found = figures([text("dense", *low), text("sparse", *high)])
    own = of(found, "sparse", PERPLEXITY, "text:a.txt")
    assert own.value == pytest.approx(math.exp(1.85)) and own.count == 2
    assert own.difference == pytest.approx(math.expm1(0.1)) and own.low < own.value < own.high
    (curve,) = curves([text("dense", *low)])
    assert curve.perplexity == pytest.approx((math.exp(1.25), math.exp(2.25)))


def test_questions_of_one_context_are_one_look_at_it() -> None:
    scores = [1.0, 0.0, 1.0, 1.0]
    records = tuple({"score": score} for score in scores)
    prompts = tuple(
        Prompt((context, question), "a", turn=1) for context in (1, 2) for question in (3, 4)
    )
    one = replace(outcome("dense", scores), records=records, prompts=prompts)
    (found,) = figures([one])
    assert (found.count, found.value) == (2, 0.75)


def test_how_many_prompts_a_loss_takes_follows_from_the_pairs() -> None:
    # Differences -1, 0, 0, 0: a spread of 0.5, and (2.8016 * 0.5 / 0.05)^2.
    found = figures([outcome("dense", [1.0] * 4), outcome("m", [0.0, 1.0, 1.0, 1.0])])
    assert of(found, "m", SCORE).needed == math.ceil((2.80159 * 0.5 / 0.05) ** 2) == 785
    assert of(found, "m", NLL).needed is None and of(found, "dense", SCORE).needed is None
    alone = figures([outcome("dense", [1.0]), outcome("m", [0.0])])
    assert of(alone, "m", SCORE).needed is None, "one prompt has no spread"


def test_many_looks_at_a_table_are_corrected_together() -> None:
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


def test_a_method_that_ran_on_fewer_prompts_is_paired_with_dense_on_these() -> None:
    prompts = tuple(Prompt((number, 7), "a") for number in range(3))

    def some(method: str, numbers: tuple[int, ...], scores: list[float], task: str) -> Outcome:
        records = tuple({"score": score} for score in scores)
        own = tuple(prompts[number] for number in numbers)
        return replace(outcome(method, scores, task), records=records, prompts=own)

    both = [some("dense", (0, 1, 2), [1.0, 0.0, 1.0], task) for task in ("u", "t")]
    found = figures([*both, some("m", (2, 0), [0.0, 1.0], "t")])
    assert of(found, "m", SCORE, "t").difference == -0.5 and of(found, "m", SCORE, "t").count == 2
    assert of(found, "dense", SCORE, "t").count == 3
    pooled = [each.method for each in found if each.task == ALL]
    assert pooled == ["dense"], "a mean of other tasks is no method's of all"


def test_differences_of_each_seed_stand_beside() -> None:
    dense, own = outcome("dense", [1.0, 1.0, 0.0, 1.0]), outcome("m", [0.0, 0.0, 0.0, 1.0])
    found = figures([replace(dense, seeds=2), replace(own, seeds=2)])
    assert of(found, "m", SCORE).by_seed == (-1.0, 0.0) and of(found, "dense", SCORE).by_seed == ()
    assert of(figures([dense, own]), "m", SCORE).by_seed == ()


def test_a_divergence_is_a_figure_without_a_test_and_never_below_0() -> None:
    near = replace(outcome("m", [1.0, 1.0]), records=({"kl": 0.01}, {"kl": 0.2}))
    found = of(figures([outcome("dense", [1.0, 1.0]), near]), "m", KL)
    assert (found.value, found.low, found.p, found.few) == (pytest.approx(0.105), 0.0, None, False)
    assert found.high > 0.2


def test_answers_after_a_prompt_are_compared_as_texts() -> None:
    scored = Prompt((1, 2, 3, 4), None, scored=((1, 2),))
    asked = [Prompt((1, 2), "a"), Prompt((1, 3), "b"), Prompt((1, 4), None), scored]
    own = [{"text": "x"}, {"text": ""}, {"blocks": []}, {"text": "", "as_dense": 0.5}]
    dense = [{"text": "x"}, {"text": "y"}, {"blocks": []}, {"text": ""}]
    found = [record.get("as_dense") for record in as_dense(asked, own, dense)]
    assert found == [1.0, 0.0, None, 0.5]
