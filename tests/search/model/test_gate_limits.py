"""Losses by task and over all answers, and the limits that they exceed."""

from __future__ import annotations

import re
from dataclasses import replace
from math import exp, inf, nan
from typing import Any

import numpy as np
import pytest

from artifacts import HeadwiseError, TaskFigures
from profiling.quality.sequences import Losses, TokenSequence
from search.model.limits import Limits
from search.model.losses import (
    POOL,
    ContextLoss,
    context_losses,
    format_row,
    loss_by_kind,
    loss_by_task,
    lost_fraction,
    mean_kl,
    perplexity_rise,
    pooled,
    task_figures,
)


def task(name: str = "kv", **changes: Any) -> TaskFigures:
    """A task of 40 questions that loses little."""
    good = {
        "kl": 0.01,
        "nll_rise": 0.01,
        "prompts": 4,
        "answers": 40,
        "dense_right": 30,
        "lost": 1,
        "won": 0,
        "loss": 0.02,
        "loss_low": -0.01,
        "loss_high": 0.05,
    }
    return TaskFigures.model_construct(**{"task": name, **good, **changes})


def text(name: str = "prose", **changes: Any) -> TaskFigures:
    figures = {
        "kl": 0.01,
        "prompts": 4,
        "perplexity_ratio": 1.01,
        "perplexity_low": 1.005,
        "perplexity_high": 1.015,
    }
    return TaskFigures.model_construct(**{"task": name, **figures, **changes})


def by_task(sequences: Any, losses: Any) -> tuple[TaskFigures, ...]:
    return task_figures(context_losses(sequences, losses))


@pytest.mark.parametrize(
    ("bad", "limits", "says"),
    [
        (
            task(loss=0.17, loss_low=0.06, loss_high=0.28),
            {},
            r"kv: 17\.0% fewer correct answers \(6\.0% to 28\.0%\), the limit is 5\.0% .*",
        ),
        (
            text(perplexity_ratio=1.08, perplexity_low=1.05, perplexity_high=1.11),
            {},
            r"prose: perplexity rises by 8\.00% \(5\.00% to 11\.00%\), the limit is 3\.00% .*",
        ),
        (
            task(lost=9, fewer_low=0.06, fewer_high=0.54),
            {},
            r"kv: of 30 correct answers 9 are lost, and 0 others are won: 30\.0% fewer \(.*",
        ),
        (task(kl=0.06), {"max_kl": 0.05}, r"kv: KL .* 0\.06 .* 0\.05 \(--max-kl\)"),
        (task(nll_rise=0.3), {"max_nll": 0.1}, r"kv: -log p .* 0\.300 .* 0\.1 \(--max-nll\)"),
    ],
    ids=["lost", "perplexity", "counted", "kl", "nll"],
)
def test_each_limit_fails_alone(bad, limits, says):
    good = [text(), task("other")]
    assert Limits(**limits).exceeded(good) is None
    fault = Limits(**limits).exceeded([*good, bad])
    assert fault is not None and re.fullmatch(says, fault), fault
    # It is detected at any position; a mean over the tasks would hide it.
    assert Limits(**limits).exceeded([bad, *good]) == fault


def test_default_limits_are_on_answers_and_perplexity_alone():
    assert Limits().exceeded([task(kl=5.0, nll_rise=5.0), text(kl=5.0)]) is None


def test_several_faults_report_the_worst():
    twice = task("twice", loss=0.2, loss_low=0.1, loss_high=0.3)
    thrice = text("thrice", perplexity_ratio=1.1, perplexity_low=1.09, perplexity_high=1.11)
    assert Limits().exceeded([twice, thrice]).startswith("thrice: perplexity ")
    assert Limits().exceeded([thrice, twice]).startswith("thrice: perplexity ")


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        # A loss whose interval includes the limit is no finding.
        ({"loss": 0.2, "loss_low": 0.04}, False),
        ({"loss": 0.2, "loss_low": 0.051}, True),
        # Without an interval nothing is.
        ({"loss": 0.9, "loss_low": None, "loss_high": None}, False),
    ],
)
def test_loss_beyond_chance_exceeds_its_limit(changes, fails):
    assert (Limits().exceeded([task(**changes)]) is not None) == fails


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_kl", 0.0, "got 0"),
        ("max_perplexity", -1.0, "got -1"),
        ("max_nll", nan, "got nan"),
        ("max_lost", 0.0, "got 0"),
        ("max_lost", 2.0, "1, got 2"),
        ("max_perplexity", inf, "got inf"),
    ],
)
def test_limits_out_of_range_are_refused(name, value, says):
    with pytest.raises(HeadwiseError, match=f"--{name.replace('_', '-')} must be .* {says}"):
        Limits(**{name: value})


def sequence(name: str, sizes: tuple[int, ...]) -> TokenSequence:
    spans = []
    at = 50
    for size in sizes:
        spans.append((at, at + size))
        at += size + 3
    return TokenSequence(task=name, ids=tuple(range(at)), context=50, answers=tuple(spans))


def losses(
    sizes: tuple[int, ...], rise: list[float], right: list[bool], dense: list[bool], kl: float
) -> Losses:
    return Losses(
        kl=np.full(10, kl),
        nll=np.full(30, kl + 1.0),
        dense_nll=np.ones(30),
        answer_tokens=np.array(sizes, dtype=np.int64),
        answer_nll=np.array(rise) + 2,
        answer_dense_nll=np.full(len(sizes), 2.0),
        right=np.array(right, dtype=bool),
        dense_right=np.array(dense, dtype=bool),
        clear=np.array(right, dtype=float),
        dense_clear=np.ones(len(sizes)),
    )


def test_losses_are_grouped_by_task():
    sequences = [sequence("kv", (2, 3)), sequence("prose", ()), sequence("kv", (5,))]
    contexts = context_losses(
        sequences,
        [
            losses((2, 3), [0.2, 0.6], [True, False], [True, True], 0.1),
            losses((), [], [], [], 0.3),
            losses((5,), [1.2], [True], [False], 0.2),
        ],
    )
    kv, prose = task_figures(contexts)
    assert [kv.task, prose.task] == ["kv", "prose"]
    assert kv.kl == pytest.approx(0.15) and prose.kl == pytest.approx(0.3)
    assert kv.nll_rise == pytest.approx((0.2 + 0.6 + 1.2) / 10) and kv.perplexity_ratio is None
    # Two contexts: what lies between them is not known, so there are no bounds.
    ends = (kv.nll_rise_low, kv.nll_rise_high, kv.loss_low, kv.loss_high)
    assert ends == (None,) * 4 and prose.perplexity_low is None
    assert (kv.prompts, kv.answers, kv.dense_right, kv.lost, kv.won) == (2, 3, 2, 1, 1)
    # Three answers that dense attention gets right for sure, of which two stay so.
    assert kv.loss == pytest.approx(1 / 3)
    assert prose.perplexity_ratio == pytest.approx(exp(0.3))
    assert (prose.nll_rise, prose.answers) == (None, None)
    by_name = loss_by_task(contexts)
    assert by_name == {"kv": pytest.approx(kv.kl + 0.2), "prose": prose.kl}
    assert loss_by_kind(contexts) == {"answer": by_name["kv"], "text": by_name["prose"]}
    assert mean_kl(contexts) == pytest.approx((kv.kl + 0.3) / 2)


def test_windows_of_text_have_an_interval_from_four_on():
    windows = [replace(sequence("prose", ()), ids=(at, *range(49))) for at in range(4)]
    rises = [losses((), [], [], [], kl) for kl in (0.01, 0.02, 0.03, 0.04)]
    (four,) = by_task(windows, rises)
    half = 3.182 * np.std([0.01, 0.02, 0.03, 0.04], ddof=1) / 2
    ends = (four.perplexity_low, four.perplexity_high)
    assert ends == pytest.approx((exp(0.025 - half), exp(0.025 + half)), rel=1e-4)


def facts(fall: float, at: int) -> ContextLoss:
    """A context of 40 answers of which dense attention gets 20, and loses a fraction of these."""
    return ContextLoss(
        task="facts", digest=str(at), kl=0.1, answers=40, tokens=80.0, clear=20.0,
        fall=20 * fall,
    )  # fmt: skip


def test_lost_fraction_counts_contexts_as_units():
    """Half of eight contexts lose all of their answers: eight units, not 320."""
    contexts = [facts(float(at % 2), at) for at in range(8)]
    interval = lost_fraction(contexts, 0.95)
    half = 2.365 * np.std([1, 0] * 4, ddof=1) / 8**0.5
    assert interval.value == 0.5 and interval.count == 8
    assert (interval.low, interval.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)


def test_figures_where_one_context_has_all_correct_answers_have_no_interval():
    counts = [{"won": 1}, {}, {}, {"dense_right": 5, "clear": 5.0}]
    few = {"tokens": 80.0, "answers": 40, "kl": 0.1}
    contexts = [
        ContextLoss(task="facts", digest=str(at), **few, **counted)
        for at, counted in enumerate(counts)
    ]
    (figures,) = task_figures(contexts)
    assert figures.fewer == -0.2 and figures.loss == 0
    ends = (figures.fewer_low, figures.fewer_high, figures.loss_low, figures.loss_high)
    assert ends == (None,) * 4 and figures.nll_rise_low == figures.nll_rise_high == 0
    row = format_row(figures)
    assert row.endswith("artifact 6 (0 lost, 1 won), +20.0%, ties smoothed -0.0%"), row
    assert Limits().exceeded([figures]) is None


def test_pooled_answers_of_one_context_are_one_unit():
    """Twice the answers of the same four contexts do not narrow the interval."""
    prompt = replace(sequence("facts", (2, 2, 2)), labels=("asked", "asked", "later"))
    lost = losses((2, 2, 2), [0.4, 0.4, 0.0], [False, False, True], [True] * 3, 0.1)
    contexts = context_losses([prompt] * 2, [lost] * 2)
    assert [each.task for each in contexts] == ["facts/asked", "facts/later"] * 2
    (unit,) = pooled(contexts)
    assert unit.answers == 6 and unit.lost == 4
    *_, pool = task_figures(contexts)
    assert (pool.task, pool.prompts, pool.loss_low) == (POOL, 1, None)


def test_pooled_tasks_of_one_text_are_counted_by_its_windows():
    contexts = [
        replace(facts(0.1, at), unit=str(at), digest=f"{task}{at}", task=task)
        for task in ("a", "b")
        for at in range(4)
    ]
    *_, pool = task_figures(contexts)
    assert (pool.task, pool.prompts, pool.answers) == (POOL, 4, 320)


def test_windows_that_share_text_are_one_unit():
    windows = [
        ContextLoss(task="prose", digest=str(at), kl=0.0, text=0.01 * at, unit=str(at // 2))
        for at in range(4)
    ]
    interval = perplexity_rise(windows, 0.95)
    assert interval.count == 2 and interval.value == pytest.approx(exp(0.015) - 1)


def test_pool_leaves_text_out():
    prose = context_losses([sequence("prose", ())], [losses((), [], [], [], 0.05)])
    assert pooled(prose) == [] and len(task_figures(prose)) == 1


def test_row_names_answers_and_loss_with_ties_smoothed():
    row = format_row(task(lost=6, won=1, loss=0.034, loss_low=0.011, loss_high=0.057))
    assert row.endswith(
        "correct of 40: dense 30, artifact 25 (6 lost, 1 won), -16.7%, ties smoothed -3.4% "
        "(-5.7% to -1.1%)"
    )
    assert format_row(text()).endswith("perplexity +1.00% (+0.50% to +1.50%)")
    few = format_row(task(loss_low=None, loss_high=None))
    assert few.endswith("ties smoothed -2.0%") and "None" not in few


@pytest.mark.parametrize("value", [nan, inf])
def test_figures_of_a_loss_that_is_no_number_have_no_interval(value):
    contexts = [replace(facts(0.0, at), rise=value) for at in range(4)]
    (figures,) = task_figures(contexts)
    assert figures.loss_low is None
