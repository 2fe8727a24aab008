"""Tasks solved anew from the texts of their prompts, and metrics by values worked out by hand."""

from __future__ import annotations

import re

import pytest

from artifacts import HeadwiseError
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Find, Prompt, make_prompts
from profiling.quality.answers import is_right
from tests.profiling.tokenizers import byte_level


def made(task: str, samples: int = 3) -> list[tuple[Prompt, str]]:
    """Prompts with their texts."""
    tokenizer = byte_level()
    prompts = make_prompts(task, tokenizer, length=4000, samples=samples, seed=0)
    return [(prompt, tokenizer.decode(prompt.input_ids)) for prompt in prompts]


def test_line_retrieval_asks_for_a_line_that_is_there(tokenizer):
    for prompt in make_prompts("line_retrieval", tokenizer, length=1500, samples=4, seed=1):
        text = tokenizer.decode(prompt.input_ids)
        listed, _, question = text.rpartition("The value of")
        values = re.findall(r"The value of (\S+) is (\d+)\.", listed)
        assert len(dict(values)) == len(values) > 20
        asked = re.fullmatch(r" (\S+) is", question)
        assert asked and dict(values)[asked[1]] == prompt.answer


def test_two_stages_lead_to_the_value_and_the_examples_are_right(tokenizer):
    depths = []
    for prompt in make_prompts("two_stage_retrieval", tokenizer, length=1600, samples=8, seed=1):
        text = tokenizer.decode(prompt.input_ids)
        listed, _, question = text.partition("Find the box of the owner first")
        boxes = re.findall(r"(\S+) owns the box (\S+)\.", listed)
        values = re.findall(r"The value of (\S+) is (\d+)\.", listed)
        assert len(dict(boxes)) == len(boxes) and len(dict(values)) == len(values)
        worked = re.findall(r"(\S+) owns the box (\S+)\. The value of (\S+) is (\d+)\.", question)
        assert len(worked) == 3
        for owner, box, of, value in worked:
            assert (box, value) == (dict(boxes)[owner], dict(values)[box]) and of == box
        asked = re.search(r"(\S+) owns the box$", question)
        assert asked
        box = dict(boxes)[asked[1]]
        assert prompt.answer == f"{box}. The value of {box} is {dict(values)[box]}"
        assert prompt.answer.split()[-1] not in question and box not in question
        depths += [find.span[0] / len(prompt.input_ids) for find in prompt.finds]
    assert min(depths) < 0.3 < 0.6 < max(depths), "lines are to be anywhere"


@pytest.mark.parametrize("own", [False, True])
def test_hops_lead_to_the_answer_through_the_text(tokenizer, story, own):
    task = f"multi_hop:{story}" if own else "multi_hop"
    for prompt in make_prompts(task, tokenizer, length=1800, samples=6, seed=1):
        text, _, question = tokenizer.decode(prompt.input_ids).partition("Answer each question")
        said = re.findall(r"(\w+)'s (\w+) is (\w+)\.", text)
        facts = {(who, what): whom for who, what, whom in said}
        assert len(facts) == 12
        asked = re.findall(r"Who is the (\w+) of (\w+)'s (\w+)\?", question)
        assert len(asked) == 4
        for other, who, one in asked:
            through = facts[who, one]
            solved = f"{who}'s {one} is {through}. {through}'s {other} is {facts[through, other]}"
            assert f"{solved}." in question or solved.endswith(str(prompt.answer))
        assert prompt.answer and prompt.answer not in question


@pytest.mark.parametrize(
    ("given", "right"),
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
def test_an_answer_needs_both_finds_in_turn(given, right):
    second = Find(" 123", (0, 1), lead=". The value of box-a is")
    prompt = Prompt.to_find((1,), Find(" box-a", (0, 1)), second)
    assert is_right(prompt, given) is right


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
def test_metrics(metric, references, text, expected):
    assert score(prompt(metric, *references), text) == pytest.approx(expected)


def test_what_a_prompt_does_not_say_is_an_error_and_no_answer_is_right():
    with pytest.raises(HeadwiseError, match="without an answer cannot be scored"):
        score(Prompt((1,), None), "a")
    assert not is_right(Prompt((1,), None), "a")


def test_right_is_right_by_the_tasks_own_metric():
    assert is_right(prompt("all", "1", "2"), "It is 2 and 1")
    assert not is_right(prompt("all", "1", "2"), "1")
    several = Prompt.to_find(
        (1,), Find(" 1", (0, 1)), Find(" 2", (0, 1), lead=","), metric="all", references=("1", "2")
    )
    assert several.answer == "1, 2" and several.continuation == " 1, 2"
    assert score(several, "2, 1") == 1
