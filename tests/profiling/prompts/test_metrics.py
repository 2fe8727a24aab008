"""Metrics against values worked out by hand."""

from __future__ import annotations

import random

import pytest

from artifacts import HeadwiseError
from profiling.prompts.metrics import METRICS, score
from profiling.prompts.prompt import Find, Prompt
from profiling.quality.answers import is_right


def prompt(metric: str, *references: str) -> Prompt:
    return Prompt((1,), references[0], metric=metric, references=references)


@pytest.mark.parametrize(
    ("metric", "references", "text", "expected"),
    [
        ("begins", ["123"], " 123, I think", 1),
        ("begins", ["123"], "It is 123", 0),
        ("begins", ["no", "yes"], "yes.", 1),
        ("all", ["One", "two", "3", "4"], "ONE, then 3 and 33", 2 / 4),
        ("chapters", ["3", "7", "9"], "3, 7 and 8</answer> 9", 2 / 4),
        ("chapters", ["3"], "<answer>3</answer>", 1),
        ("numbered", ["red hat", "Nafop"], "1. The red hat.\n2. nafop\n</answer>", 1),
        ("numbered", ["red hat", "Nafop"], "2. Nafop\n1. a blue hat", 1 / 2),
        ("numbered", ["red hat", "Nafop"], "1. Nafop\n2. red hat", 0),
        ("numbered", ["red hat"], "1. red hat\n1. blue hat", 1),
        ("item", ["red hat"], "<explanation>...</explanation><answer>The Red Hat</answer>", 1),
        ("item", ["red hat"], "red hat and shoes", 0),
    ],
)
def test_metrics(metric: str, references: list[str], text: str, expected: float) -> None:
    assert score(prompt(metric, *references), text) == pytest.approx(expected)


def test_what_a_prompt_does_not_say_is_an_error_and_no_answer_is_right() -> None:
    with pytest.raises(HeadwiseError, match="without an answer cannot be scored"):
        score(Prompt((1,), None), "a")
    with pytest.raises(HeadwiseError, match="unknown metric 'bleu'; known: begins, all, chapters"):
        score(prompt("bleu", "a"), "a")
    assert not is_right(Prompt((1,), None), "a")


def test_right_is_right_by_the_tasks_own_metric() -> None:
    assert is_right(prompt("all", "1", "2"), "It is 2 and 1")
    assert not is_right(prompt("all", "1", "2"), "1")
    several = Prompt.to_find(
        (1,), Find(" 1", (0, 1)), Find(" 2", (0, 1), lead=","), metric="all", references=("1", "2")
    )
    assert several.answer == "1, 2" and several.continuation == " 1, 2"
    assert score(several, "2, 1") == 1


def test_every_metric_lies_within_0_and_1() -> None:
    rng = random.Random(0)
    for name in METRICS:
        for _ in range(30):
            text, *references = (
                "".join(rng.choices("AB12 .,\n", k=rng.randint(0, 12))) for _ in range(3)
            )
            assert 0 <= score(prompt(name, *references), text) <= 1


def test_nothing_asked_and_nothing_answered_is_right() -> None:
    assert METRICS["chapters"]("none", ()) == METRICS["numbered"]("", ()) == 1
    assert METRICS["chapters"]("4", ()) == 0
