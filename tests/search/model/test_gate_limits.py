"""Limits by task: the worst counts, each fails alone, and one lost answer fails nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from math import exp, isnan, nan
from typing import Any

import numpy as np
import pytest

from artifacts import HeadwiseError, TaskFigures
from profiling.quality.sequences import Losses, TokenSequence
from search.model.limits import Limits
from search.model.losses import (
    POOL,
    ContextLoss,
    advice,
    context_losses,
    format_row,
    loss_by_kind,
    loss_by_task,
    mean_kl,
    summary,
    task_figures,
    verdict,
)


def task(name: str = "kv", **changes: Any) -> TaskFigures:
    """A task of 40 questions that loses little."""
    good = {
        "kl": 0.01,
        "perplexity_ratio": None,
        "nll_rise": 0.01,
        "nll_rise_low": -0.02,
        "nll_rise_high": 0.04,
        "prompts": 4,
        "answers": 40,
        "dense_right": 30,
        "lost": 1,
        "won": 0,
        "fewer_low": 0.0,
        "fewer_high": 0.5,
    }
    # Not validated, as those of a search: one may be not a number.
    return TaskFigures.model_construct(**{"task": name, **good, **changes})


def text(name: str = "prose", **changes: Any) -> TaskFigures:
    rises = ("nll_rise", "nll_rise_low", "nll_rise_high")
    none = dict.fromkeys((*rises, "answers", "dense_right", "lost", "won"))
    return task(name, **{"perplexity_ratio": 1.01, **none, **changes})


def by_task(sequences: Any, losses: Any) -> tuple[TaskFigures, ...]:
    return task_figures(context_losses(sequences, losses))


@pytest.mark.parametrize(
    ("bad", "limit", "says"),
    [
        (task(kl=0.06), "max_kl", r"kv: KL .* 0\.06 .* 0\.05 .*"),
        (text(perplexity_ratio=1.08), "max_perplexity", r"prose: perplexity .* 8\.00%.* 3\.00%.*"),
        (
            task(nll_rise=0.3, nll_rise_low=0.1, nll_rise_high=0.5),
            "max_nll",
            r"kv: -log p .* 0\.300 .* \(0\.100 to 0\.500\).* 0\.1 .*",
        ),
        (
            task(lost=6, won=1, fewer_low=0.04, fewer_high=0.31),
            "max_lost",
            r"kv: of 30 correct .* 6 .* lost.* 1 .* won: 17% .*\(4% to 31%\).* 10% .*",
        ),
    ],
    ids=["kl", "perplexity", "nll", "lost"],
)
def test_each_limit_fails_alone(bad, limit, says):
    good = [text(), task("other")]
    assert Limits().violation(good) is None
    fault = Limits().violation([*good, bad])
    assert re.fullmatch(says, fault) and f"--{limit.replace('_', '-')}" in fault
    # It is detected at any position; a mean over the tasks would hide it.
    assert Limits().violation([bad, *good]) == fault
    assert Limits(**{limit: None}).violation([*good, bad]) is None
    only = dict.fromkeys(("max_kl", "max_perplexity", "max_nll", "max_lost"))
    only[limit] = getattr(Limits(), limit)
    assert Limits(**only).violation([*good, bad]) == fault


def test_several_faults_report_the_worst():
    twice = task("twice", kl=0.1)
    thrice = task("thrice", lost=9, fewer_low=0.1)
    assert Limits().violation([twice, thrice]).startswith("thrice: of 30 correct ")
    assert Limits().violation([thrice, task("four", kl=0.2)]).startswith("four: KL ")


RISE = {"nll_rise": 0.3, "nll_rise_high": 0.7}


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        # One lost answer alone fails nothing, and two do.
        *(({"dense_right": right, "lost": 1, "fewer_low": 0.1}, False) for right in (1, 2, 5)),
        *(({"dense_right": right, "lost": 2, "fewer_low": 0.1}, True) for right in (2, 3, 6)),
        # Won answers offset lost ones.
        ({"dense_right": 20, "lost": 4, "won": 1, "fewer_low": 0.01}, True),
        ({"dense_right": 20, "lost": 4, "won": 2, "fewer_low": 0.01}, False),
        ({"dense_right": 3, "lost": 2, "won": 1}, False),
        # A loss whose interval includes zero is no finding.
        ({"dense_right": 20, "lost": 4, "fewer_low": 0.0}, False),
        ({"dense_right": 20, "lost": 4, "fewer_low": 0.01}, True),
        ({**RISE, "nll_rise_low": -0.01}, False),
        ({**RISE, "nll_rise_low": 0.01}, True),
        # NaN fails.
        ({"kl": nan}, True),
        ({"perplexity_ratio": nan}, True),
        ({"nll_rise": nan, "nll_rise_low": nan}, True),
    ],
)
def test_loss_beyond_chance_fails(changes, fails):
    assert (Limits().violation([task(**changes)]) is not None) == fails


def test_limits_name_a_loss_that_is_no_number_before_larger_ones():
    tasks = [task(kl=5.0), task(kl=nan), task(kl=9.0)]
    limits = Limits(max_kl=1.0)
    assert "nan" in (limits.violation(tasks) or "")
    assert isnan(limits.worst_ratio(tasks)) and limits.worst_ratio([]) == 0


@pytest.mark.parametrize(
    ("name", "value"), [("max_kl", 0.0), ("max_perplexity", -1.0), ("max_nll", nan)]
)
def test_limits_must_be_positive(name, value):
    with pytest.raises(HeadwiseError, match=f"--{name.replace('_', '-')} must be above 0"):
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
    spread = np.full(10, kl)
    return Losses(
        kl=spread,
        nll=spread + 1.0,
        dense_nll=np.ones(10),
        answer_tokens=np.array(sizes, dtype=np.int64),
        answer_nll=np.array(rise) + 2,
        answer_dense_nll=np.full(len(sizes), 2.0),
        right=np.array(right, dtype=bool),
        dense_right=np.array(dense, dtype=bool),
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
    assert (kv.nll_rise_low, kv.nll_rise_high, kv.fewer_low, kv.fewer_high) == (None,) * 4
    assert (kv.prompts, kv.answers, kv.dense_right, kv.lost, kv.won) == (2, 3, 2, 1, 1)
    assert prose.perplexity_ratio == pytest.approx(exp(0.3))
    assert (prose.nll_rise, prose.answers) == (None, None)
    by_name = loss_by_task(contexts)
    assert by_name == {"kv": pytest.approx(kv.kl + 0.2), "prose": prose.kl}
    assert loss_by_kind(contexts) == {"answer": by_name["kv"], "text": by_name["prose"]}
    assert mean_kl(contexts) == pytest.approx((kv.kl + 0.3) / 2)


def test_answer_kinds_are_separate_and_counted_per_context():
    facts_sequence = replace(sequence("facts", (2, 2, 2)), labels=("asked", "asked", "later"))
    lost = losses((2, 2, 2), [0.4, 0.4, 0.0], [False, False, True], [True, True, True], 0.1)
    unchanged = losses((2, 2, 2), [0.0, 0.0, 0.0], [True, True, True], [True, True, True], 0.1)
    asked, later, pool = by_task([facts_sequence] * 8, [lost] * 4 + [unchanged] * 4)
    assert pool.task == POOL
    assert (asked.task, asked.answers, asked.lost) == ("facts/asked", 16, 8)
    assert (later.task, later.answers, later.lost) == ("facts/later", 8, 0)
    # Half of eight contexts lose all of their answers: the fraction of eight units is less
    # certain than that of sixteen.
    assert asked.fewer == 0.5 and asked.nll_rise == pytest.approx(0.1)
    half = 2.365 * np.std([1, 0] * 4, ddof=1) / 8**0.5
    assert (asked.fewer_low, asked.fewer_high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)
    assert (later.fewer_low, later.fewer_high) == (0, 0)


@pytest.mark.parametrize("contexts", [1, 2, 3])
def test_answers_of_fewer_than_four_contexts_prove_nothing(contexts):
    """One prompt that loses both answers proves nothing; four such prompts are a finding."""
    chain = sequence("chain", (2, 2))
    gone = losses((2, 2), [3.0, 3.0], [False, False], [True, True], 0.01)
    (few,) = by_task([chain] * contexts, [gone] * contexts)
    (four,) = by_task([chain] * 4, [gone] * 4)
    assert few.lost == 2 * contexts and few.nll_rise == four.nll_rise == 1.5
    limits = Limits()
    assert limits.violation([few]) is None and limits.violation([four]).startswith("chain: ")
    assert limits.worst_ratio([few]) == pytest.approx(0.2) and limits.worst_ratio([four]) > 9
    # KL is tested on any number of prompts.
    assert Limits(max_kl=0.005).violation([few]) is not None
    row = format_row(few)
    lost = 2 * contexts
    assert f"correct of {lost}: dense {lost}, artifact 0 ({lost} lost, 0 won)" in row
    assert "nan" not in row and "None" not in row and "interval" not in row
    assert row.endswith(f"(not tested: answers take 4 contexts, got {contexts})")
    assert "not tested" not in format_row(four)


def facts(fewer: int, other_losses: int, seed: int = 0) -> tuple[TokenSequence, Losses]:
    """A context with three kinds of answers, of which dense attention gets ten, five and five."""
    sizes = (1,) * 20
    labels = ("asked",) * 10 + ("chained",) * 5 + ("later",) * 5
    prompt = replace(sequence("facts", sizes), labels=labels)
    right = [at >= fewer for at in range(10)] + [at >= other_losses for at in range(5)] * 2
    result = losses(sizes, [0.0] * 20, right, [True] * 20, 0.01)
    return replace(prompt, ids=(seed, *prompt.ids[1:])), result


def test_pooled_loss_of_one_in_five_is_detected():
    """In four contexts, each kind of answer may be chance, but all of them together are not."""
    sequences, results = zip(
        *(facts(*some, seed=at) for at, some in enumerate([(3, 0), (0, 2), (3, 0), (1, 1)])),
        strict=True,
    )
    tasks = by_task(sequences, results)
    *kinds, pool = tasks
    assert all(Limits().violation([task]) is None for task in kinds)
    assert (pool.task, pool.prompts, pool.answers) == (POOL, 4, 80)
    assert (pool.dense_right, pool.lost) == (80, 13)
    assert re.match("all answers: of 80 correct answers 13 ", Limits().violation(tasks))
    assert Limits().worst_ratio(tasks) == pytest.approx(13 / 80 / 0.1)
    assert Limits().violation(by_task(sequences[:3], results[:3])) is None
    assert Limits(max_lost=None).violation(tasks) is None


def test_pool_and_mean_count_a_context_once():
    """Twice the answers of the same four contexts do not narrow the interval."""
    prompt, result = facts(2, 1, seed=1)
    other, same = facts(0, 0, seed=2)
    contexts = context_losses([prompt, other, prompt, other], [result, same, result, same])
    *_, pool = task_figures(contexts)
    # Two contexts are two units, however many answers they have and however often they come.
    assert (pool.task, pool.prompts, pool.fewer_low) == (POOL, 2, None)
    assert len(task_figures([each for each in contexts if each.task == "facts/asked"])) == 1
    prose = context_losses([sequence("prose", ())], [losses((), [], [], [], 0.05)])
    assert len(task_figures(prose)) == 1
    # The three kinds of answers of one prompt are one set in the mean.
    one = context_losses([prompt], [result])
    assert len(one) == 3 and mean_kl([*one, *prose]) == pytest.approx((0.01 + 0.05) / 2)


@pytest.mark.parametrize(
    ("right", "proven", "samples"),
    [(0, False, None), (1, False, 72), (14, False, 6), (71, False, 2), (72, True, None)],
)
def test_too_few_correct_answers_prove_nothing_and_name_samples_needed(right, proven, samples):
    """Correct answers in the text row do not count: it asks no questions."""
    tasks = [*task_figures(contexts_of("kv", right, 4)), text()]
    assert verdict(tasks).proven == proven and verdict(tasks).why.endswith(" of 4 contexts")
    assert verdict(tasks).why.startswith(f"{right} right answer")
    if samples:
        assert advice(tasks, 1) == f"--samples {samples} would see a loss of one in five"
        assert advice(tasks, 2) == f"--samples {2 * samples} would see a loss of one in five"
        more = [*task_figures(contexts_of("kv", samples * right, 4 * samples)), text()]
        assert verdict(more).proven
    elif not proven:
        assert advice(tasks, 1).startswith("dense attention gets none right")


def test_pooled_answers_may_suffice_but_three_contexts_never_do():
    few = task_figures([*contexts_of("a", 40, 4), *contexts_of("b", 40, 4)])
    assert not verdict(few[:1]).proven and verdict(few).proven
    assert verdict(few).why == "80 right answers of 4 contexts"
    many = task_figures(contexts_of("a", 300, 3))
    assert not verdict(many).proven
    assert advice(many, 1) == "answers take 4 contexts, which needs a longer file"


def test_passing_result_reports_text_and_answers():
    # Text alone asks for no answers.
    assert verdict([text()]).proven
    assert summary([text(), text("other", perplexity_ratio=1.02)]) == "perplexity +2.00%"
    answers = task(dense_right=80, fewer_low=0.01, fewer_high=0.1)
    assert summary([answers, text()]) == "correct answers -1% (95% interval -10% to -1%)"


def test_task_figures_pool_tasks_of_one_text_by_its_windows():
    contexts = [
        replace(context, unit=context.digest, digest=f"{task}{context.digest}")
        for task in ("a", "b")
        for context in contexts_of(task, 300, 4)
    ]
    *_, pool = task_figures(contexts)
    assert (pool.task, pool.prompts, pool.answers) == (POOL, 4, 1600)


def contexts_of(task: str, right: int, count: int) -> list[ContextLoss]:
    """Spread `right` correct answers over `count` contexts."""
    spread = [right // count + (at < right % count) for at in range(count)]
    return [
        ContextLoss(task=task, digest=str(at), kl=0.01, tokens=9, answers=200, dense_right=some)
        for at, some in enumerate(spread)
    ]
