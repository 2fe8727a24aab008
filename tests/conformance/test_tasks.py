"""Conformance of tasks: every task of the registry goes through every test here."""

from __future__ import annotations

import re
from itertools import combinations, product
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling.prompts.held_out import GATE_SET, Seen, text_of
from profiling.prompts.metrics import score
from profiling.prompts.prompt import KINDS, Prompt, digest, parse_name
from tests import typed as module
from tests.conformance.task_definitions import CUES, INSIDE, NEEDLES, SOLVERS, TEXTS
from tests.conformance.task_digests import digests
from tests.processes import Process
from tests.profiling.conftest import story, tokenizer
from tests.profiling.prompts.files import LONG, count_overlaps, file_task
from tests.profiling.tokenizers import byte_level
from tests.sampling import sampled
from tests.typed import make_prompts, per_context, seeded_prompts

__all__ = ["story", "tokenizer"]

# Parameters with which short prompts of tokenizers that know few words have enough words.
FEWER = {"cwe": "cwe@words=3,common=4,uncommon=2"}
# Tasks of whole lines: the error of a prompt that is too short names a length to try.
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
# Tasks that take a file.
OF_FILES = [name for name, kind in KINDS.items() if kind.takes_file != "no"]


def assert_evidence_is_in_its_span(prompt: Prompt, tokenizer: Any) -> None:
    for part in prompt.evidence:
        assert part.span[1] - part.span[0] < 200
        assert part.expected.strip() in tokenizer.decode(prompt.input_ids[slice(*part.span)])


EVERY = (*GENERATED, *MORE, *OF_STORY)
CASES = [
    *product(("bytes", "metaspace"), EVERY),
    *product(("bytes with bos", "bytes with bos and eos"), ("passkey", "line_turns", "vt")),
]
# The second tokenizer is left to the solvers, except for tasks of each kind of haystack; one task
# of needles represents the others.
SPACED = ("passkey", "kv_retrieval", "text:STORY")
OTHER_NEEDLES = [task for task in EVERY if task.startswith("niah") and "multikey_1" not in task]
DEFAULT = [
    (tokenizer, task)
    for tokenizer, task in CASES
    if task in SPACED or (tokenizer != "metaspace" and task not in OTHER_NEEDLES)
]


def test_tasks_every_task_has_a_definition():
    assert {*SOLVERS, *INSIDE, *TEXTS} == set(KINDS)


@pytest.mark.parametrize(("tokenizer", "task"), sampled(CASES, *DEFAULT), indirect=["tokenizer"])
def test_prompts_have_the_length_seed_answer_and_evidence(tokenizer, story, task):
    task = task.replace("STORY", str(story))
    whole, bare = (tokenizer("a", add_special_tokens=own)["input_ids"] for own in (True, False))
    begins = [] if whole[0] == bare[0] else whole[:1]

    def make(samples=2, seed=0):
        return make_prompts(task, tokenizer, length=2600, samples=samples, seed=seed)

    prompts = make()
    # Again, with one more of those that share no context.
    again = make(2 if per_context(task) > 1 else 3)
    assert again[:2] == prompts and {len(prompt.input_ids) for prompt in again} == {2600}
    assert digest(prompts[:1]) != digest(make(1, seed=1))
    assert prompts[0].input_ids != prompts[1].input_ids
    for prompt in prompts:
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        assert [i for i in prompt.input_ids if i in special] == begins
        assert list(prompt.input_ids[: len(begins)]) == begins
        assert_evidence_is_in_its_span(prompt, tokenizer)
        if prompt.answer is not None:
            assert score(prompt, "no") == 0
            # Text after a right answer, as in the prompt's examples and in chats.
            for more in ("", "\n\nThe", "\nUser"):
                assert score(prompt, f"{prompt.continuation}{more}") == 1


SOLVED = [
    *(FEWER.get(name, name) for name in SOLVERS),
    *("vt@chains=3,hops=2", "fwe@alpha=1.5", "passkey:STORY", "multi_hop:STORY"),
]


@pytest.mark.parametrize("task", SOLVED)
def test_answers_follow_from_the_text_of_the_prompt(tokenizer, story, task):
    solve = SOLVERS[parse_name(task)]
    task = task.replace("STORY", str(story))
    for prompt in make_prompts(task, tokenizer, length=2600, samples=3, seed=1):
        answers = solve(tokenizer.decode(prompt.input_ids))
        assert sorted(answers) == sorted(prompt.references or [prompt.answer])
        assert len(set(answers)) == len(answers)
        assert len(prompt.evidence) == NEEDLES.get(task, len(prompt.evidence))
        assert score(prompt, ", ".join(answers)) == 1
        if prompt.metric == "all":
            assert score(prompt, answers[0]) == pytest.approx(1 / len(answers))


@pytest.mark.parametrize("task", INSIDE)
def test_answers_inside_a_prompt_were_stated_once_and_long_before(tokenizer, task):
    length = 4096
    for prompt in make_prompts(task, tokenizer, length=length, samples=2, seed=0):
        ids = prompt.input_ids
        if task == "facts" and not prompt.scored:
            continue
        assert len(prompt.scored) >= 3 and (prompt.answer is None or task == "facts")
        assert max(stop for _, stop in prompt.scored) <= len(prompt.context) - 128
        labels = prompt.labels or [task] * len(prompt.scored)
        for (start, stop), label in zip(prompt.scored, labels, strict=True):
            value, before = tokenizer.decode(ids[start:stop]).strip(), tokenizer.decode(ids[:start])
            cue = before[before.rindex("\n") + 1 :]
            name = re.search(CUES[label], cue.strip())
            assert name
            statement = before[: -len(cue)].rindex(name[1])
            assert value in before[statement : statement + len(name[1]) + len(value) + 60]
            between = tokenizer(before[statement:], add_special_tokens=False)["input_ids"]
            assert len(between) >= length // 4 - 60


def test_evidence_of_every_task_is_anywhere():
    tokenizer = byte_level()
    for task in map(lambda name: FEWER.get(name, name), SOLVERS):
        prompts = make_prompts(task, tokenizer, length=2600, samples=8, seed=3)
        depths = [part.span[0] / 2600 for prompt in prompts for part in prompt.evidence]
        assert not depths or min(depths) < 0.4 < 0.6 < max(depths), task


@pytest.mark.parametrize("task", GENERATED)
def test_make_prompts_serves_every_length_from_the_smallest(task):
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
        assert_evidence_is_in_its_span(prompt, tokenizer)


LENGTHS = [
    (name, length)
    for name, kind in KINDS.items()
    for length in (131_072, 1_048_576)
    if name != "prose" and kind.takes_file != "must"
]
# One task of each file.
LARGE = [("kv_retrieval", 1_048_576), *((name, 131_072) for name in ("line_turns", "vt", "cwe"))]


@pytest.mark.parametrize(("name", "length"), sampled(LENGTHS, *LARGE))
def test_make_prompts_of_long_lengths(name, length):
    tokenizer = byte_level(bos=True)
    prompt = make_prompts(name, tokenizer, length=length, samples=1, seed=0)[0]
    assert len(prompt.input_ids) == length and prompt.input_ids.count(tokenizer.bos_token_id) == 1
    if prompt.answer is not None:
        assert score(prompt, str(prompt.continuation)) == 1 and score(prompt, "no") == 0
    assert_evidence_is_in_its_span(prompt, tokenizer)


def test_make_prompts_in_another_process_makes_the_same(story):
    tasks = [*GENERATED, f"passkey:{story}", f"niah_multivalue:{story}", f"text:{story}"]
    # That process has another seed of hashes.
    code, printed, complained = Process("tests.conformance.task_digests", *tasks).finish()
    assert code == 0, complained
    other = printed.split()
    assert other == digests(tasks) and len(set(other)) == len(tasks)


@pytest.mark.parametrize("kind", OF_FILES)
def test_text_spans_of_a_file_task_are_one_window_of_the_file(kind, tmp_path):
    tokenizer = byte_level()
    task = file_task(kind, tmp_path / "a.txt", 8)
    text = (tmp_path / "a.txt").read_text()
    for prompt in make_prompts(task, tokenizer, length=LONG, samples=3, seed=0):
        window = tokenizer.decode(text_of(prompt))
        assert len(window) > LONG // 2 and window in text
        inside = {at for span in prompt.text_spans for at in range(*span)}
        rest = [token for at, token in enumerate(prompt.input_ids) if at not in inside]
        other = tokenizer.decode(rest)
        assert not any(other[at : at + 30] in text for at in range(len(other) - 29))


@pytest.mark.parametrize("kind", OF_FILES)
def test_prompts_of_a_file_are_held_out_or_their_overlaps_are_counted(kind, tmp_path):
    """As far as a task has a part in it: tests/profiling/prompts has the lengths of files."""
    tokenizer = byte_level()
    task = file_task(kind, tmp_path / "a.txt", 12)
    options = {"length": LONG, "samples": 1}
    first = make_prompts(task, tokenizer, seed=0, **options)
    seen = Seen(first)
    second = module.held_out([task], tokenizer, seed=0, seen=seen, number=GATE_SET, **options)
    seen.add(*second)
    result = seeded_prompts(task, tokenizer, seeds=(0, 1), seen=seen, **options)
    assert result.overlapping == 0
    for one, other in combinations((*first, *second, *result.prompts), 2):
        assert count_overlaps([one], [other]) == 0
    # All but one are known: each seed has another prompt, and one of them is new.
    known = make_prompts(task, tokenizer, length=LONG, samples=99, seed=2)[1:]
    result = seeded_prompts(task, tokenizer, seeds=(0, 1, 2), seen=Seen(known), **options)
    assert result.overlapping == count_overlaps(result.prompts, known) == 2
    assert result.seeds == (0, 1, 2)
    # As many seeds as there are prompts and more: none is made twice.
    result = seeded_prompts(task, tokenizer, seeds=range(20), seen=Seen(), **options)
    assert len(result.prompts) == len(known) + 1
    for one, other in combinations(result.prompts, 2):
        assert count_overlaps([one], [other]) == 0
