"""The gate by task: the worst one counts, each limit fails alone, and one lost answer alone fails nothing."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest

from artifacts import HeadwiseError
from profiling.quality.sequences import Losses, TokenSequence
from search.model.limits import Limits
from search.model.task_losses import ENOUGH, POOL, TaskLoss, by_task, line, lost_answers, mean_kl, pooled

GOOD = {"kl": 0.01, "perplexity_ratio": None, "nll_rise": 0.01, "nll_rise_low": -0.02, "nll_rise_high": 0.04}


def task(name: str = "kv", **changes: Any) -> TaskLoss:
    counts = {
        "prompts": 4,
        "answers": 40,
        "dense_right": 30,
        "lost": 1,
        "won": 0,
        "fewer_low": 0.0,
        "fewer_high": 0.5,
    }
    return TaskLoss(**{"task": name, **GOOD, **counts, **changes})


def text(name: str = "prose", **changes: Any) -> TaskLoss:
    none = {"perplexity_ratio": 1.01, **dict.fromkeys(("nll_rise", "nll_rise_low", "nll_rise_high"))}
    return task(name, **{**none, "answers": 0, "dense_right": 0, "lost": 0, **changes})


def test_what_loses_little_passes() -> None:
    assert Limits().fault([text(), task()]) is None


@pytest.mark.parametrize(
    "bad, limit, says",
    [
        (task(kl=0.06), "kl", r"kv: KL to dense attention is 0.06 nats a token, the limit (--max-kl) is 0.05"),
        (
            text(perplexity_ratio=1.08),
            "perplexity",
            "prose: perplexity rises by 8.00%, the limit (--max-perplexity) is 3.00%",
        ),
        (
            task(nll_rise=0.3, nll_rise_low=0.1, nll_rise_high=0.5),
            "nll",
            "kv: -log p of the right answer rises by 0.300 nats a token (0.100 to 0.500), the limit (--max-nll) is 0.1",
        ),
        (
            task(lost=6, won=1, fewer_low=0.04, fewer_high=0.31),
            "lost",
            "kv: 6 of 30 answers that dense attention gets right are lost and 1 of the others won, "
            "17% fewer (4% to 31%), the limit (--max-lost) is 10%",
        ),
    ],
    ids=["kl", "perplexity", "nll", "lost"],
)
def test_each_limit_fails_alone(bad: TaskLoss, limit: str, says: str) -> None:
    good = [text(), task("other")]
    fault = Limits().fault([*good, bad])
    assert fault == says
    # Among the others it is seen wherever it stands, and a mean over the tasks would have hidden it.
    assert Limits().fault([bad, *good]) == fault
    assert Limits(**{limit: None}).fault([*good, bad]) is None
    only = dict.fromkeys(("kl", "perplexity", "nll", "lost")) | {limit: getattr(Limits(), limit)}
    assert Limits(**only).fault([*good, bad]) == fault


def test_of_several_faults_the_worst_is_said() -> None:
    twice, thrice = task("twice", kl=0.1), task("thrice", lost=9, fewer_low=0.1)
    assert (said := Limits().fault([twice, thrice])) is not None and said.startswith("thrice: 9 of 30")
    assert (said := Limits().fault([thrice, task("four", kl=0.2)])) is not None and said.startswith("four: KL")


@pytest.mark.parametrize("dense_right", [1, 2, 5])
def test_one_lost_answer_alone_fails_nothing_and_two_do(dense_right: int) -> None:
    assert Limits().fault([task(dense_right=dense_right, lost=1, fewer_low=0.1)]) is None
    assert Limits().fault([task(dense_right=dense_right + 1, lost=2, fewer_low=0.1)]) is not None


def test_answers_that_are_won_stand_against_those_that_are_lost() -> None:
    assert Limits().fault([task(dense_right=20, lost=4, won=1, fewer_low=0.01)]) is not None
    assert Limits().fault([task(dense_right=20, lost=4, won=2, fewer_low=0.01)]) is None
    assert Limits().fault([task(dense_right=3, lost=2, won=1)]) is None


def test_what_its_interval_does_not_tell_from_none_is_no_finding() -> None:
    assert Limits().fault([task(dense_right=20, lost=4, fewer_low=0.0)]) is None
    assert Limits().fault([task(dense_right=20, lost=4, fewer_low=0.01)]) is not None
    assert Limits().fault([task(nll_rise=0.3, nll_rise_low=-0.01, nll_rise_high=0.7)]) is None
    assert Limits().fault([task(nll_rise=0.3, nll_rise_low=0.01, nll_rise_high=0.7)]) is not None


@pytest.mark.parametrize("name", ["kl", "perplexity_ratio", "nll_rise"])
def test_what_is_not_a_number_fails(name: str) -> None:
    changes = {name: float("nan")} | ({"nll_rise_low": float("nan")} if name == "nll_rise" else {})
    assert Limits().fault([text(**changes) if name == "perplexity_ratio" else task(**changes)]) is not None


@pytest.mark.parametrize("name", ["kl", "perplexity", "nll", "lost"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_limits_are_above_0(name: str, value: float) -> None:
    with pytest.raises(HeadwiseError, match=f"--max-{name} must be above 0"):
        Limits(**{name: value})


def test_no_more_than_all_answers_can_be_lost() -> None:
    assert Limits(lost=1).lost == 1
    with pytest.raises(HeadwiseError, match="--max-lost must be above 0 and at most 1, got 2"):
        Limits(lost=2)


def sequence(name: str, sizes: tuple[int, ...]) -> TokenSequence:
    spans, at = [], 50
    for size in sizes:
        spans.append((at, at + size))
        at += size + 3
    return TokenSequence(task=name, ids=tuple(range(at)), context=50, answers=tuple(spans))


def losses(sizes: tuple[int, ...], rise: list[float], right: list[bool], dense: list[bool], kl: float) -> Losses:
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


def test_losses_are_gathered_by_task() -> None:
    made = [sequence("kv", (2, 3)), sequence("prose", ()), sequence("kv", (5,))]
    found = by_task(
        made,
        [
            losses((2, 3), [0.2, 0.6], [True, False], [True, True], 0.1),
            losses((), [], [], [], 0.3),
            losses((5,), [1.2], [True], [False], 0.2),
        ],
    )
    kv, prose = found
    assert [kv.task, prose.task] == ["kv", "prose"]
    assert kv.kl == pytest.approx(0.15) and prose.kl == pytest.approx(0.3)
    assert kv.nll_rise == pytest.approx((0.2 + 0.6 + 1.2) / 10) and kv.perplexity_ratio is None
    # Two contexts: what lies between them is not known, so there are no bounds.
    assert (kv.nll_rise_low, kv.nll_rise_high, kv.fewer_low, kv.fewer_high) == (None, None, None, None)
    assert (kv.prompts, kv.answers, kv.dense_right, kv.lost, kv.won) == (2, 3, 2, 1, 1)
    assert prose.perplexity_ratio == pytest.approx(exp(0.3)) and prose.nll_rise is None and prose.answers == 0
    assert kv.loss == pytest.approx(kv.kl + 0.2) and prose.loss == prose.kl
    assert mean_kl(found) == pytest.approx((kv.kl + 0.3) / 2)
    assert lost_answers(found) == {"dense_right": 2, "lost": 1}


def test_kinds_of_answers_are_apart_and_contexts_are_the_units() -> None:
    one = replace(sequence("facts", (2, 2, 2)), labels=("asked", "asked", "later"))
    lost = losses((2, 2, 2), [0.4, 0.4, 0.0], [False, False, True], [True, True, True], 0.1)
    kept = losses((2, 2, 2), [0.0, 0.0, 0.0], [True, True, True], [True, True, True], 0.1)
    asked, later = by_task([one] * 8, [lost] * 4 + [kept] * 4)
    assert (asked.task, asked.answers, asked.lost, later.task, later.answers, later.lost) == (
        *("facts/asked", 16, 8),
        *("facts/later", 8, 0),
    )
    # Half of eight contexts lose all of their answers: as eight units the share is less certain than as sixteen.
    assert asked.fewer == 0.5 and asked.nll_rise == pytest.approx(0.1)
    half = 2.365 * np.std([1, 0] * 4, ddof=1) / 8**0.5
    assert (asked.fewer_low, asked.fewer_high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)
    assert (later.fewer_low, later.fewer_high) == (0, 0)


@pytest.mark.parametrize("contexts", [1, 2, 3])
def test_answers_of_fewer_contexts_than_four_are_no_evidence(contexts: int) -> None:
    """A prompt that loses both of its answers tells nothing of other prompts; four that do are a finding."""
    one, gone = sequence("chain", (2, 2)), losses((2, 2), [3.0, 3.0], [False, False], [True, True], 0.01)
    (few,), (four,) = by_task([one] * contexts, [gone] * contexts), by_task([one] * 4, [gone] * 4)
    assert few.lost == 2 * contexts and few.nll_rise == four.nll_rise == 1.5
    assert Limits().fault([few]) is None and Limits().strain([few]) == pytest.approx(0.01 / 0.05)
    assert (said := Limits().fault([four])) is not None and said.startswith("chain: ") and Limits().strain([four]) > 9
    # A KL is judged on any number of prompts.
    assert Limits(kl=0.005).fault([few]) is not None
    said = line(few)
    assert f"answers lost {2 * contexts} of {2 * contexts}" in said and "nan" not in said and "None" not in said
    assert said.endswith(f"(not tested: answers take 4 contexts, got {contexts})")
    assert "not tested" not in line(four) and "too few to see" in line(four)


def test_what_is_foreseen_from_one_context_has_no_interval_either() -> None:
    (few,) = by_task([sequence("kv", (2,))], [losses((2,), [1.0], [False], [True], 0.1)])
    more = few.times(2)
    assert (more.nll_rise, more.nll_rise_low, more.nll_rise_high) == (2 * (few.nll_rise or 0), None, None)


def test_lines_say_what_is_too_few() -> None:
    assert "too few" in line(task(dense_right=ENOUGH - 1)) and "too few" not in line(task(dense_right=ENOUGH))
    assert "perplexity +1.00%" in line(text())


def facts(fewer: int, others: int, seed: int = 0) -> tuple[TokenSequence, Losses]:
    """A context whose three kinds of answers lose so many of ten that dense attention gets right, and of five each."""
    sizes, labels = (1,) * 20, ("asked",) * 10 + ("chained",) * 5 + ("later",) * 5
    one = replace(sequence("facts", sizes), labels=labels)
    right = [at >= fewer for at in range(10)] + [at >= others for at in range(5)] * 2
    found = losses(sizes, [0.0] * 20, right, [True] * 20, 0.01)
    return replace(one, ids=(seed, *one.ids[1:])), found


def test_a_loss_of_one_in_five_of_all_answers_is_seen_where_no_task_has_enough() -> None:
    """Four contexts; in each kind of answers it may be chance, over all of them it is not."""
    made, found = zip(*(facts(*some, seed=at) for at, some in enumerate([(3, 0), (0, 2), (3, 0), (1, 1)])), strict=True)
    tasks = by_task(made, found)
    assert all(Limits().fault([task]) is None for task in tasks)
    (pool,) = pooled(tasks)
    assert (pool.task, pool.prompts, pool.answers, pool.dense_right, pool.lost) == (POOL, 4, 80, 80, 13)
    assert (said := Limits().fault(tasks)) is not None and said.startswith("all answers: 13 of 80 answers")
    assert Limits().strain(tasks) == pytest.approx(13 / 80 / 0.1)
    assert Limits().fault(by_task(made[:3], found[:3])) is None
    assert Limits(lost=None).fault(tasks) is None


def test_the_pool_counts_a_context_once_and_needs_several_kinds() -> None:
    """Twice the answers of the same four contexts leave their share as uncertain as it was."""
    (one, found), (other, same) = facts(2, 1, seed=1), facts(0, 0, seed=2)
    tasks = by_task([one, other, one, other], [found, same, found, same])
    # Two contexts are two units, however many answers they have and however often they come.
    assert pooled(tasks)[0].prompts == 2 and pooled(tasks)[0].fewer_low is None
    assert pooled(tasks[:1]) == [] and pooled([text()]) == []


def test_a_set_of_prompts_counts_once_in_the_mean_kl() -> None:
    (one, found), window = facts(0, 0), sequence("prose", ())
    tasks = by_task([one, window], [found, losses((), [], [], [], 0.05)])
    assert len(tasks) == 4 and mean_kl(tasks) == pytest.approx((0.01 + 0.05) / 2)


def test_figures_of_an_artifact_count_prompts_and_answers() -> None:
    made, found = zip(*(facts(2, 1, seed=at) for at in range(4)), strict=True)
    asked, *_ = by_task(made, found)
    figures = asked.figures(50)
    assert (figures.prompts, figures.answers, figures.dense_right, figures.lost) == (4, 40, 40, 8)
    assert figures.fewer_low == asked.fewer_low and line(figures) == line(asked)
    (prose,) = by_task([sequence("prose", ())], [losses((), [], [], [], 0.3)])
    assert prose.figures(50).answers is None and line(prose.figures(50)) == line(prose)
