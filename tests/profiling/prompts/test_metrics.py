"""Scores of answers against values computed by hand."""

from __future__ import annotations

import pytest

from artifacts import HeadwiseError
from profiling.prompts.metrics import is_final, score
from profiling.prompts.prompt import Evidence, Prompt
from profiling.quality.answers import is_right


@pytest.mark.parametrize(
    ("metric", "references", "text", "value"),
    [
        ("begins", ("12345",), " 12345, I think", 1),
        ("begins", ("12345",), "12345", 1),
        ("begins", ("12345",), "123456", 0),
        ("begins", ("12345",), "It is 12345", 0),
        ("begins", ("a1", "b2"), "b2.", 1),
        ("begins", ("a1", "b2"), "b22", 0),
        ("begins", ("the word",), "the words", 1),
        # RULER's string_match_all, as published.
        ("all", ("12345", "7"), "x123456", 0.5),
        ("all", ("One", "two", "3", "4"), "ONE, then 3 and 33", 0.5),
    ],
)
def test_score_equals_a_hand_computed_value(metric, references, text, value):
    prompt = Prompt((1, 2), references[0], metric=metric, references=references)
    assert score(prompt, text) == value
    assert is_right(prompt, text) == (value == 1)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("box 12. The value of box 12 is 34", True),
        ("box 12: 34!", True),
        ("box 123, then 34", False),
        ("box 12, then 134", False),
        ("It is box 12. The value of box 12 is 34", False),
        ("34, which is in box 12", False),
        ("", False),
    ],
)
def test_score_of_two_parts_needs_both_in_order(text, right):
    second = Evidence(" 34", (0, 1), lead=". The value of box 12 is")
    prompt = Prompt.answered_by((1,), Evidence(" box 12", (0, 1)), second)
    assert score(prompt, text) == right


def test_score_of_several_parts_by_the_metric_of_the_task():
    parts = Evidence(" 1", (0, 1)), Evidence(" 2", (0, 1), lead=",")
    several = Prompt.answered_by((1,), *parts, metric="all", references=("1", "2"))
    assert several.answer == "1, 2" and several.continuation == " 1, 2"
    assert score(several, "2, 1") == 1 and score(several, "1") == 1 / 2


def test_score_without_an_answer_is_refused():
    with pytest.raises(HeadwiseError, match="without an answer cannot be scored"):
        score(Prompt((1,), None), "a")
    assert not is_right(Prompt((1,), None), "a")


def test_is_final_waits_for_the_end_of_a_number():
    prompt = Prompt((1, 2), "12345")
    finals = {"1234": False, "12345": False, "12345.": True, "123456": False}
    assert {text: is_final(prompt, text) for text in finals} == finals
    assert is_final(Prompt((1, 2), "word"), "word")
    assert not is_final(Prompt((1, 2), None), "word")
