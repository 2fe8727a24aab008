"""Metrics of answers against values computed by hand."""

from __future__ import annotations

import pytest

from artifacts import HeadwiseError
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Evidence, Prompt
from profiling.quality.answers import is_right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("box-a. The value of box-a is 123", True),
        ("box-a. So the value is 123.", True),
        ("box-b. The value of box-b is 123", False),
        ("It is box-a. The value of box-a is 123", False),
        ("123, which is in box-a", False),
        ("box-a. The value of box-a is 124", False),
        ("", False),
    ],
)
def test_is_right_needs_both_parts_in_order(text, right):
    second = Evidence(" 123", (0, 1), lead=". The value of box-a is")
    prompt = Prompt.answered_by((1,), Evidence(" box-a", (0, 1)), second)
    assert is_right(prompt, text) is right


def prompt(metric: str, *references: str) -> Prompt:
    return Prompt((1,), references[0], metric=metric, references=references)


@pytest.mark.parametrize(
    ("metric", "references", "text", "expected"),
    [
        ("begins", ["123"], " 123, I think", 1),
        ("begins", ["123"], "It is 123", 0),
        ("begins", ["no", "yes"], "yes.", 1),
        ("all", ["One", "two", "3", "4"], "ONE, then 3 and 33", 2 / 4),
    ],
)
def test_score_by_each_metric(metric, references, text, expected):
    assert score(prompt(metric, *references), text) == pytest.approx(expected)


def test_score_without_an_answer_is_refused():
    with pytest.raises(HeadwiseError, match="without an answer cannot be scored"):
        score(Prompt((1,), None), "a")
    assert not is_right(Prompt((1,), None), "a")


def test_is_right_uses_the_metric_of_the_task():
    assert is_right(prompt("all", "1", "2"), "It is 2 and 1")
    assert not is_right(prompt("all", "1", "2"), "1")
    several = Prompt.answered_by(
        (1,),
        Evidence(" 1", (0, 1)),
        Evidence(" 2", (0, 1), lead=","),
        metric="all",
        references=("1", "2"),
    )
    assert several.answer == "1, 2" and several.continuation == " 1, 2"
    assert score(several, "2, 1") == 1
