"""Long-context tasks of papers, solved anew from their texts; metrics by hand."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from profiling.prompts import babi
from profiling.prompts.prompt import Prompt, make_prompts
from tests.profiling.tokenizers import byte_level


def made(
    task: str, samples: int = 3, length: int = 4000, seed: int = 0
) -> list[tuple[Prompt, str]]:
    """Prompts with their texts."""
    tokenizer = byte_level()
    prompts = make_prompts(task, tokenizer, length=length, samples=samples, seed=seed)
    return [(prompt, tokenizer.decode(prompt.input_ids)) for prompt in prompts]


def story(task: str) -> list[tuple[Prompt, list[str], list[str | None], str]]:
    """Prompts of a story: its chapters, the thing bought in each, and the question."""
    found = []
    for prompt, text in made(task):
        told = text.partition("<context>")[2].partition("</context>")[0]
        chapters = re.split(r"Chapter \d+:\n", told)[1:]
        bought = [(re.findall(r"bought the ([\w ]+)\.", each) or [None])[0] for each in chapters]
        question = text.rpartition("</context>")[2]
        asked = question.partition("\n<answer>")[0].strip()
        assert text.count(asked) == 2, "asked before and after"
        things = [thing for thing in bought if thing]
        assert len(set(things)) == len(things)
        found.append((prompt, chapters, bought, question))
    return found


def test_things_of_a_chapter_can_be_looked_up() -> None:
    said = {"place": "came to the {} for", "meet": "met {}.", "buy": "bought the {}."}
    for prompt, chapters, _, question in story("story_retrieval@asked=6"):
        lines = re.findall(r"\d+\. (.*\?)", question)
        for line, right in zip(lines, prompt.references, strict=True):
            chapter = chapters[int(re.findall(r"Chapter (\d+)", line)[0]) - 1]
            assert (
                next(form for word, form in said.items() if word in line).format(right) in chapter
            )


def test_what_was_bought_before_can_be_looked_up() -> None:
    for prompt, _, bought, question in story("story_multihop"):
        thing = re.findall(r"bought the ([\w ]+)\?", question)[0]
        assert bought[bought.index(thing) - 1] == str(prompt.answer).partition("\n")[0]
        assert len(set(prompt.choices)) == len(prompt.choices) > 2
        assert prompt.answer in prompt.choices


def test_chapters_in_which_nothing_was_bought_can_be_found() -> None:
    for prompt, chapters, bought, _ in story("story_filtering"):
        empty = [str(at) for at, thing in enumerate(bought, start=1) if thing is None]
        assert empty == list(prompt.references)
        assert set(re.findall(r"sold the ([\w ]+)\.", "".join(chapters))) <= set(bought)


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
