"""What guessing gives, by hand."""

from __future__ import annotations

import pytest

from profiling.prompts.prompt import Prompt, make_prompts
from profiling.quality.guessing import compared, guessed
from tests.profiling.tokenizers import byte_level

PLACES = ("hall", "attic", "office", "garden")


def test_options_are_guessed_and_other_answers_are_not() -> None:
    told = Prompt((1,), "attic", choices=PLACES)
    assert guessed(told, "score") == guessed(told, "choice") == 1 / 4
    # Its choices are only there to be compared: none says how an answer would be guessed.
    nodes = Prompt((1,), "[a]", metric="nodes", references=("a",), choices=("[a]", "[b]"))
    assert guessed(nodes, "score") == 0 and guessed(nodes, "choice") == 1 / 2
    assert guessed(Prompt((1,), "7"), "score") == guessed(Prompt((1,), "7"), "choice") == 0
    # "0123456789ab" and "0123456789ax" share half of what follows the mark.
    again = Prompt((1,), "0123456789ab", metric="marked", choices=("0123456789ab", "0123456789ax"))
    assert guessed(again, "score") == pytest.approx((1 + 1 / 2) / 2)


def test_the_commonest_answer_inside_a_prompt() -> None:
    inside = Prompt((1, 5, 1, 6, 1, 5), None, scored=((1, 2), (3, 4), (5, 6)))
    assert guessed(inside, "score") == 2 / 3
    (made,) = make_prompts("label_map", byte_level(), length=3000, samples=1, seed=0)
    labels = {made.input_ids[start:stop] for start, stop in made.scored}
    assert 1 / len(labels) <= guessed(made, "score") < 0.5


def test_a_forced_choice_compares_eight_at_most() -> None:
    many = Prompt((1,), "last", choices=(*"abcdefghij", "last"))
    assert compared(many) == (*"abcdefg", "last") and guessed(many, "choice") == 1 / 8
