"""Properties of every task: length, seed, samples, own answer, same prompts in every process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling.prompts.metrics import score
from profiling.prompts.prompt import KINDS, Prompt, digest, make_prompts, per_context
from tests.profiling.tokenizers import byte_level
from tests.sampling import sampled

ROOT = Path(__file__).parents[3]
# What fits into short prompts of tokenizers that know few words.
FEWER = {"cwe": "cwe@words=3,common=4,uncommon=2"}
# Of lines as they come: too short a prompt says what to try.
WHOLE = ("line_turns", "line_asked", "chain", "facts", "label_map")
# Prose takes a tokenizer some seconds at first.
GENERATED = [
    FEWER.get(name, name)
    for name, kind in KINDS.items()
    if kind.takes_file != "must" and name != "prose"
]
MORE = [
    "prose",
    "vt@chains=3,hops=2",
    "fwe@alpha=1.5",
    "line_turns@questions=1",
    "passkey@depth=0.5:STORY",
]
OF_STORY = [
    f"{name}:STORY" for name, kind in KINDS.items() if kind.takes_file == "may" or name == "text"
]


def assert_finds_are_there(prompt: Prompt, tokenizer: Any) -> None:
    for find in prompt.finds:
        assert find.expected.strip() in tokenizer.decode(prompt.input_ids[slice(*find.span)])


EVERY = (*GENERATED, *MORE, *OF_STORY)
CASES = [
    *product(("bytes", "metaspace"), EVERY),
    *product(("bytes with bos", "bytes with bos and eos"), ("passkey", "line_turns", "vt")),
]
# Needles stand for one another, and other tasks are made with the second tokenizer where they are
# solved.
SPACED = ("passkey", "kv_retrieval", "text:STORY")
NEEDLES = [task for task in EVERY if task.startswith("niah") and "multikey_1" not in task]
USUAL = [
    (tokenizer, task)
    for tokenizer, task in CASES
    if task in SPACED or (tokenizer != "metaspace" and task not in NEEDLES)
]


@pytest.mark.parametrize(("tokenizer", "task"), sampled(CASES, *USUAL), indirect=["tokenizer"])
def test_prompts_are_what_was_asked_for(tokenizer, story, task):
    task = task.replace("STORY", str(story))
    whole, bare = (tokenizer("a", add_special_tokens=own)["input_ids"] for own in (True, False))
    begins = [] if whole[0] == bare[0] else whole[:1]

    def made(samples=2, seed=0):
        return make_prompts(task, tokenizer, length=2600, samples=samples, seed=seed)

    prompts = made()
    # Again, with one more of those that share no context.
    again = made(2 if per_context(task) > 1 else 3)
    assert again[:2] == prompts and {len(prompt.input_ids) for prompt in again} == {2600}
    assert digest(prompts[:1]) != digest(made(1, seed=1))
    assert prompts[0].input_ids != prompts[1].input_ids
    for prompt in prompts:
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        assert [i for i in prompt.input_ids if i in special] == begins
        assert list(prompt.input_ids[: len(begins)]) == begins
        assert_finds_are_there(prompt, tokenizer)
        if prompt.answer is not None:
            assert score(prompt, "no") == 0
            # What a model goes on with after a right answer, as examples and chats in the prompt
            # do.
            for more in ("", "\n\nThe", "\nUser"):
                assert score(prompt, f"{prompt.continuation}{more}") == 1


@pytest.mark.parametrize("task", GENERATED)
def test_every_length_from_the_smallest_on(task):
    tokenizer = byte_level(bos=True)
    with pytest.raises(HeadwiseError, match=r"^length 1 is too small") as caught:
        make_prompts(task, tokenizer, length=1, samples=1, seed=0)
    if task.startswith(WHOLE):
        return
    # Another seed has other words or keys, of other lengths.
    smallest = int(re.findall(r"\d+", str(caught.value))[-1]) + 90
    for length in range(smallest, smallest + 6):
        (prompt,) = make_prompts(task, tokenizer, length=length, samples=1, seed=length)
        assert len(prompt.input_ids) == length
        assert_finds_are_there(prompt, tokenizer)


LONG, LONGEST = 131_072, 1_048_576
LENGTHS = [
    (name, length)
    for name, kind in KINDS.items()
    for length in (LONG, LONGEST)
    if name != "prose" and kind.takes_file != "must"
]
# One of each file of tasks at 128K tokens, and one at 1M.
KEPT = [(name, LONG) for name in ("kv_retrieval", "line_turns", "vt", "cwe")]


@pytest.mark.parametrize(("name", "length"), sampled(LENGTHS, *KEPT, ("kv_retrieval", LONGEST)))
def test_prompts_of_a_million_tokens(name, length):
    tokenizer = byte_level(bos=True)
    prompt = make_prompts(name, tokenizer, length=length, samples=1, seed=0)[0]
    assert len(prompt.input_ids) == length and prompt.input_ids.count(tokenizer.bos_token_id) == 1
    if prompt.answer is not None:
        assert score(prompt, str(prompt.continuation)) == 1 and score(prompt, "no") == 0
    assert_finds_are_there(prompt, tokenizer)


def digests(tasks: list[str]) -> list[str]:
    tokenizer = byte_level()
    how: dict[str, Any] = {"length": 2600, "samples": 1, "seed": 5}
    return [digest(make_prompts(task, tokenizer, **how)) for task in tasks]


def test_other_processes_make_the_same_prompts(story):
    tasks = [*GENERATED, f"passkey:{story}", f"niah_multivalue:{story}", f"text:{story}"]
    code = f"from {__name__} import digests; print(*digests({tasks!r}))"
    # That process has another seed of hashes.
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    other = subprocess.check_output(command, env=environment, text=True, cwd=ROOT).split()
    assert other == digests(tasks) and len(set(other)) == len(tasks)
