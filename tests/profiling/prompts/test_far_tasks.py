"""Tasks that a dense tail cannot solve: questions, places of answers, shared contexts."""

from __future__ import annotations

import ast
import itertools
import random
import re
import tarfile
from asyncio import base_events
from pathlib import Path
from typing import Any

import pytest

from profiling.prompts.kind import LengthTooShort
from profiling.prompts.prompt import Prompt
from profiling.prompts.tasks import recalls, texts
from profiling.prompts.words import compounds, words
from tests.typed import make_prompts

LENGTH = 4096
# At this length some contexts of facts have too few things to ask for.
SHORT = 2048


def made(task: str, tokenizer: Any, samples: int = 2) -> list[Prompt]:
    return make_prompts(task, tokenizer, length=LENGTH, samples=samples, seed=0)


@pytest.mark.parametrize(
    ("task", "shared"), [("line_turns@questions=5", [5, 5, 2]), ("facts@questions=4", [4, 2])]
)
def test_turn_tasks_share_a_context_without_the_questions(tokenizer, task, shared):
    prompts = made(task, tokenizer, sum(shared))
    contexts = [prompt.context for prompt in prompts]
    assert [contexts.count(context) for context in dict.fromkeys(contexts)] == shared
    assert len({prompt.input_ids for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        start, stop = prompt.evidence[0].span
        line = tokenizer.decode(prompt.context[start:stop])
        turn = tokenizer.decode(prompt.input_ids[-prompt.turn :])
        question = re.search(r"of ([\w-]+) is$", turn)
        assert question and question[1] in line and prompt.turn < 120
        assert str(prompt.answer) in line and str(prompt.answer) not in turn
    if task.startswith("facts"):
        # Inside a context they are asked once.
        assert [bool(prompt.scored) for prompt in prompts] == [*[True, *[False] * 3], True, False]
        assert {"asked", "chained"} == set(prompts[0].labels)


def test_short_context_is_drawn_until_enough_can_come_back(tokenizer, monkeypatch):
    sizes = {"length": SHORT, "samples": 64}
    every = [make_prompts("facts", tokenizer, seed=seed, **sizes) for seed in range(10)]
    monkeypatch.setattr(recalls, "_DRAWS", 1)
    failed = 0
    for seed, prompts in enumerate(every):
        try:
            assert make_prompts("facts", tokenizer, seed=seed, **sizes) == prompts
        except LengthTooShort:
            failed += 1
    assert 0 < failed < 10


@pytest.mark.parametrize("task", ["line_retrieval", "kv_retrieval"])
def test_question_first_asks_before_the_text_only(tokenizer, task):
    usual, turned = (made(name, tokenizer) for name in (task, f"{task}@question_first=1"))
    for last, first in zip(usual, turned, strict=True):
        assert task == "kv_retrieval" or first.answer == last.answer
        start, stop = first.evidence[0].span
        text = tokenizer.decode(first.input_ids)
        line = tokenizer.decode(first.input_ids[start:stop])
        assert str(first.answer) in line
        key = re.search(r'value of ([\w-]+) |"([\w-]+)":', line)
        assert key
        name = next(group for group in key.groups() if group)
        assert text.index(name) < 300 and text.count(name) == 2 and name not in text[-100:]


def test_statements_are_in_the_order_of_ast_walk():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    match = "match x:\n case 1:\n  def f(): pass\n case _:\n  class A: pass\n"
    match += "if x:\n def g(): pass\nelse:\n def h(): pass"
    for code in (
        match,
        *(Path(module.__file__).read_text() for module in (ast, base_events, tarfile)),
    ):
        tree = ast.parse(code)
        result, expected = (
            [node for node in way(tree) if isinstance(node, documented)]
            for way in (texts._statements, ast.walk)
        )
        assert result == expected and len(result) >= 4


@pytest.mark.parametrize("endless", [words, compounds])
def test_words_never_repeat(endless):
    drawn = list(itertools.islice(endless(random.Random(0)), 60_000))
    assert len(set(drawn)) == len(drawn)
    assert any(word[-1] == "2" for word in drawn)
