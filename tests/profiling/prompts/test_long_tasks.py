"""Long-context tasks of papers, solved anew from their texts; metrics by hand."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from profiling.prompts import babi
from profiling.prompts.metrics import METRICS, score
from profiling.prompts.prompt import Prompt, make_prompts
from tests.profiling.tokenizers import byte_level


def made(
    task: str, samples: int = 3, length: int = 4000, seed: int = 0
) -> list[tuple[Prompt, str]]:
    """Prompts with their texts."""
    tokenizer = byte_level()
    prompts = make_prompts(task, tokenizer, length=length, samples=samples, seed=seed)
    return [(prompt, tokenizer.decode(prompt.input_ids)) for prompt in prompts]


@pytest.mark.parametrize("form", ["retrieval@asked=6", "multihop", "filtering"])
def test_stories_can_be_looked_up(form: str) -> None:
    for prompt, text in made(f"story_{form}"):
        told = text.partition("<context>")[2].partition("</context>")[0]
        parts = re.split(r"Chapter \d+:\n", told)[1:]
        bought = [(re.findall(r"bought the ([\w ]+)\.", part) or [None])[0] for part in parts]
        question = text.rpartition("</context>")[2]
        assert text.count(question.partition("\n<answer>")[0].strip()) == 2, (
            "asked before and after"
        )
        if "retrieval" in form:
            for line, right in zip(
                re.findall(r"\d+\. (.*\?)", question), prompt.references, strict=True
            ):
                part = parts[int(re.findall(r"Chapter (\d+)", line)[0]) - 1]
                form_of = {
                    "place": "came to the {} for",
                    "meet": "met {}.",
                    "buy": "bought the {}.",
                }
                assert next(f for word, f in form_of.items() if word in line).format(right) in part
        elif form == "multihop":
            item = re.findall(r"bought the ([\w ]+)\?", question)[0]
            assert bought[bought.index(item) - 1] == prompt.answer.partition("\n")[0]  # type: ignore[union-attr]
            assert (
                len(set(prompt.choices)) == len(prompt.choices) > 2
                and prompt.answer in prompt.choices
            )
        else:
            assert [str(at) for at, item in enumerate(bought, start=1) if item is None] == list(
                prompt.references
            )
            assert set(re.findall(r"sold the ([\w ]+)\.", told)) <= set(bought)
        some = [item for item in bought if item]
        assert len(set(some)) == len(some)


def replay(facts: list[str]) -> dict[str, list[str]]:
    """The places where each person and thing has been, by reading facts one after another."""
    at: dict[str, str] = {}
    holds: dict[str, str] = {}
    ways: dict[str, list[str]] = {}
    for fact in facts:
        who = fact.partition(" ")[0]
        if took := re.search(r"took the (\w+)", fact):
            assert took[1] not in holds and ways.get(took[1], [at[who]])[-1] == at[who]
            holds[took[1]] = who
        elif dropped := re.search(r"dropped the (\w+)", fact):
            assert holds.pop(dropped[1]) == who
        else:
            at[who] = fact.rpartition(" ")[2].rstrip(".")
        for name in [who, *(thing for thing, by in holds.items() if by == who)]:
            way = ways.setdefault(name, [])
            if not way or way[-1] != at[who]:
                way.append(at[who])
    return ways


@pytest.mark.parametrize("number", [1, 2, 3])
def test_facts_lead_to_the_answer(number: int) -> None:
    for prompt, text in made(f"babilong_qa{number}", 6):
        told, _, question = text.rpartition("\n\nQuestion: ")
        hidden = told[told.rindex("Answer: ") :]
        ways = replay(
            re.findall(
                rf"(?:{'|'.join(babi._PEOPLE)}) (?:\w+ the \w+ there|\w+ to the \w+)\.", hidden
            )
        )
        asked = re.search(
            r"(?:Where is (?:the )?|Where was the )(\w+)(?: before the (\w+))?\?", question
        )
        assert asked
        way = ways[asked[1]]
        right = way[-1]
        if number == 3:
            before, now = list(pairwise(way))[-1]
            assert now == asked[2]
            right = before
        assert prompt.answer == right and right in prompt.choices


@pytest.mark.parametrize(
    ("metric", "references", "text", "expected"),
    [
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
def test_metrics_by_hand(metric: str, references: list[str], text: str, expected: float) -> None:
    asked = Prompt((1,), references[0], metric=metric, references=tuple(references))
    assert score(asked, text) == pytest.approx(expected)


def test_nothing_asked_and_nothing_answered_is_right() -> None:
    for metric, empty in (("chapters", "none"), ("numbered", "")):
        assert METRICS[metric](empty, ()) == 1
    assert METRICS["chapters"]("4", ()) == 0
