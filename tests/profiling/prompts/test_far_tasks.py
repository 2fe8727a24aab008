"""Tasks that a dense tail cannot solve: questions, places of answers, shared contexts."""

from __future__ import annotations

import ast
import re
import tarfile
from asyncio import base_events
from pathlib import Path
from typing import Any

import pytest

from profiling.prompts import texts
from profiling.prompts.prompt import Prompt, make_prompts
from tests.profiling.tokenizers import byte_level

INSIDE = ("line_asked", "chain", "label_map")
# What stands before an answer, by task or label, with the name of what is asked for.
CUES = {
    "line_asked": r"of ([\w-]+) is$",
    "asked": r"of ([\w-]+) is$",
    "chain": r"that of ([\w-]+), which is$",
    "chained": r"that of ([\w-]+), which is$",
    "label_map": r"(\w+):$",
}
LENGTH = 4096


def made(task: str, tokenizer: Any, samples: int = 2) -> list[Prompt]:
    return make_prompts(task, tokenizer, length=LENGTH, samples=samples, seed=0)


@pytest.mark.parametrize(
    ("task", "shared"), [("line_turns@questions=5", [5, 5, 2]), ("facts@questions=4", [4, 2])]
)
def test_questions_share_a_context_that_does_not_know_them(tokenizer, task, shared):
    prompts = made(task, tokenizer, sum(shared))
    contexts = [prompt.context for prompt in prompts]
    assert [contexts.count(context) for context in dict.fromkeys(contexts)] == shared
    assert len({prompt.input_ids for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        start, stop = prompt.finds[0].span
        line = tokenizer.decode(prompt.context[start:stop])
        turn = tokenizer.decode(prompt.input_ids[-prompt.turn :])
        asked = re.search(r"of ([\w-]+) is$", turn)
        assert asked and asked[1] in line and prompt.turn < 120
        assert str(prompt.answer) in line and str(prompt.answer) not in turn
    if task.startswith("facts"):
        # Inside a context they are asked once.
        assert [bool(prompt.scored) for prompt in prompts] == [*[True, *[False] * 3], True, False]
        assert {"asked", "chained"} == set(prompts[0].labels)


@pytest.mark.parametrize("task", [*INSIDE, "facts"])
def test_what_comes_back_was_said_once_and_long_before(tokenizer, task):
    for prompt in made(task, tokenizer):
        ids = prompt.input_ids
        if task == "facts" and not prompt.scored:
            continue
        assert len(prompt.scored) >= 3 and (prompt.answer is None or task == "facts")
        assert max(stop for _, stop in prompt.scored) <= len(prompt.context) - 128
        labels = prompt.labels or [task] * len(prompt.scored)
        for (start, stop), label in zip(prompt.scored, labels, strict=True):
            said, before = tokenizer.decode(ids[start:stop]).strip(), tokenizer.decode(ids[:start])
            cue = before[before.rindex("\n") + 1 :]
            thing = re.search(CUES[label], cue.strip())
            assert thing
            told = before[: -len(cue)].rindex(thing[1])
            assert said in before[told : told + len(thing[1]) + len(said) + 60]
            between = tokenizer(before[told:], add_special_tokens=False)["input_ids"]
            assert len(between) >= LENGTH // 4 - 60


def test_labels_stay_what_they_were():
    tokenizer = byte_level()
    text = tokenizer.decode(made("label_map", tokenizer)[0].input_ids)
    pairs = re.findall(r"^(\w+): (\w+)$", text, re.MULTILINE)[1:]
    assert len(dict(pairs)) < len(pairs) and len(set(pairs)) == len(dict(pairs))


@pytest.mark.parametrize("task", ["line_retrieval", "kv_retrieval"])
def test_a_question_may_stand_before_the_text_only(tokenizer, task):
    usual, turned = (made(name, tokenizer) for name in (task, f"{task}@question_first=1"))
    for last, first in zip(usual, turned, strict=True):
        assert task == "kv_retrieval" or first.answer == last.answer
        start, stop = first.finds[0].span
        text = tokenizer.decode(first.input_ids)
        line = tokenizer.decode(first.input_ids[start:stop])
        assert str(first.answer) in line
        key = re.search(r'value of ([\w-]+) |"([\w-]+)":', line)
        assert key
        name = next(group for group in key.groups() if group)
        assert text.index(name) < 300 and text.count(name) == 2 and name not in text[-100:]


def test_statements_come_in_the_order_of_the_whole_tree():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    match = "match x:\n case 1:\n  def f(): pass\n case _:\n  class A: pass\n"
    match += "if x:\n def g(): pass\nelse:\n def h(): pass"
    for code in (
        match,
        *(Path(module.__file__).read_text() for module in (ast, base_events, tarfile)),
    ):
        tree = ast.parse(code)
        found, expected = (
            [node for node in way(tree) if isinstance(node, documented)]
            for way in (texts._statements, ast.walk)
        )
        assert found == expected and len(found) >= 4
