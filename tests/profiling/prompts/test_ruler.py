"""RULER's tasks can be solved from what their prompts hold, and only so."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from profiling.prompts import haystacks
from profiling.prompts.kind import Request
from profiling.prompts.metrics import score
from profiling.prompts.prompt import make_prompts
from profiling.prompts.tokens import Encoder
from tests.profiling.tokenizers import byte_level

NEEDLES = {
    "niah_single_1": 1,
    "niah_single_2": 1,
    "niah_single_3": 1,
    "niah_multikey_1": 1,
    "niah_multikey_2": 1,
    "niah_multikey_3": 1,
    "niah_multivalue": 4,
    "niah_multiquery": 4,
}
# What fits into short prompts of tokenizers that know few words.
OTHERS = ["vt", "vt@chains=3,hops=2", "cwe@words=3,common=4,uncommon=2", "fwe", "fwe@alpha=1.5"]
TASKS = [*NEEDLES, *OTHERS]


def solve(text: str) -> list[str]:
    """The answers, worked out from the text alone."""
    if "secret" in text:
        asked = re.findall(r"The secret \w+s? of ([^.]+?) (?:is|are)$", text)[0]
        said = re.findall(r"One of the secret \w+s of (\S+) is ([\w-]+)\.", text)
        keys = re.split(r", | and ", asked)
        return [value for key in keys for name, value in said if name == key]
    if "VAR" in text:
        shown, _, text = text.rpartition("Variables are assigned")
        example = re.findall(r"variables have it: ([A-Z, ]+[A-Z])", shown)[0].split(", ")
        assert sorted(traced(shown)) == sorted(example)
        return traced(text)
    if "numbered list" in text:
        *_, shown, text = text.split("Below is a numbered list of words.")
        example = re.findall(r"\d+\. (\w+)", shown.split("often are:")[1])
        assert sorted(commonest(shown)) == sorted(example)
        return commonest(text)
    code = text.partition("stand for nothing.")[2].partition("Which three")[0]
    counted = Counter(code.replace("...", " ").split()).most_common(4)
    assert counted[2][1] > counted[3][1]
    return [word for word, _ in counted[:3]]


def commonest(text: str) -> list[str]:
    """The commonest words of a numbered list, as many as its question asks for."""
    listed, _, question = text.partition("Which")
    numbers, words = zip(*re.findall(r"(\d+)\. (\w+)", listed), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
    wanted = int(re.findall(r"(\d+) words", question)[0])
    counted = Counter(words).most_common()
    assert counted[wanted - 1][1] > counted[wanted][1]
    return [word for word, _ in counted[:wanted]]


def traced(text: str) -> list[str]:
    values: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        values[name] = values.get(source, source)
    asked = re.findall(r"have the value (\d+) in", text)[-1]
    return [name for name, value in values.items() if value == asked]


@pytest.mark.parametrize("task", TASKS)
def test_the_answers_can_be_worked_out(tokenizer, task):
    for prompt in make_prompts(task, tokenizer, length=2600, samples=3, seed=1):
        assert len(prompt.input_ids) == 2600
        found = solve(tokenizer.decode(prompt.input_ids))
        assert sorted(found) == sorted(prompt.references) and len(set(found)) == len(found)
        assert score(prompt, " ".join(found)) == 1
        assert score(prompt, found[0]) == pytest.approx(1 / len(found))


@pytest.mark.parametrize(("task", "answers"), NEEDLES.items())
def test_needles_stand_where_the_prompt_says(tokenizer, story, task, answers):
    own = task not in ("niah_single_1", "niah_multikey_2", "niah_multikey_3")
    starts = []
    name = f"{task}:{story}" if own else task
    for prompt in make_prompts(name, tokenizer, length=2400, samples=4, seed=2):
        assert len(prompt.finds) == len(prompt.references) == answers
        for find, answer in zip(prompt.finds, prompt.references, strict=True):
            block = tokenizer.decode(prompt.input_ids[slice(*find.span)])
            assert re.fullmatch(rf"\s?One of the secret \w+ of \S+ is {answer}\.", block)
            starts.append(find.span[0])
    assert max(starts) - min(starts) > 600, "needles are to be anywhere"


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_nothing_but_the_key_tells_the_needle_that_is_asked_for(task):
    prompt = make_prompts(task, byte_level(), length=3000, samples=1, seed=0)[0]
    text = byte_level().decode(prompt.input_ids)
    keys = re.findall(r"\nOne of the secret \w+s of (\S+) is \S+\.", text)
    assert len(keys) == len(set(keys)) > 10


def test_needles_never_split_the_users_sentences(story):
    tokenizer = byte_level()
    task = f"niah_multivalue:{story}"
    for prompt in make_prompts(task, tokenizer, length=2000, samples=3, seed=0):
        text = tokenizer.decode(prompt.input_ids)
        hay = re.sub(r" One of the secret numbers of \S+ is \d+\.", "", text)
        hay = hay.partition("about them after it.\n")[2].partition("\n\nWhat are")[0]
        assert len(hay) > 400 and hay in story.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("length", "sizes"), [(4095, (20, 3, 1, 6, 1)), (9000, (40, 10, 3, 30, 3))]
)
def test_common_words_have_rulers_counts(length, sizes):
    prompt = make_prompts("cwe", byte_level(), length=length, samples=1, seed=0)[0]
    whole = byte_level().decode(prompt.input_ids)
    _, shown, text = whole.split("Below is a numbered list of words.")
    size, *counts = sizes
    for part, (often, seldom) in ((shown, counts[:2]), (text, counts[2:])):
        counted = Counter(re.findall(r"\d+\. (\w+)", part.partition("Which")[0])).values()
        assert Counter(counted)[often] == 10 and Counter(counted)[seldom] == len(counted) - 10 > 0
        assert part == text or len(counted) == size


def test_code_words_fall_with_their_rank():
    prompt = make_prompts("fwe@alpha=2", byte_level(), length=6000, samples=1, seed=0)[0]
    whole = byte_level().decode(prompt.input_ids)
    text = whole.partition("stand for nothing.")[2].partition("Which")[0]
    counts = [count for _, count in Counter(text.split()).most_common()]
    assert counts == [int(counts[0] / rank**2) for rank in range(1, len(counts) + 1)]
    assert Counter(text.split())["..."] == counts[0]


def test_a_haystack_of_a_file_is_a_stretch_of_it_of_any_size(tmp_path):
    text = "One. Two words!\nThree\u3002\u56db\u3002 " + "no stop " * 200 + "End."
    file = tmp_path / "odd.txt"
    file.write_text(text, encoding="utf-8")
    tokenizer = byte_level()
    whole = len(tokenizer(text)["input_ids"])
    encode = Encoder(tokenizer)
    stretch = haystacks.of_file(
        Request(name="x", encode=encode, text=file, length=1, samples=1, seed=0)
    )
    for room in (0, 1, 7, 300, whole // 2):
        pieces = stretch(room, random.Random(room))
        assert sum(map(len, pieces)) == room and all(pieces)
        found = tokenizer.decode([token for piece in pieces for token in piece])
        assert found.strip("\ufffd") in text


def test_hide_goes_to_the_nearest_bound():
    pieces = [(1, 1), (2, 2, 2, 2), (3, 3)]
    ids, spans = haystacks.hide([(7,), (8, 8), (9,)], [1, 0.3, 0], pieces, 10)
    assert ids == (1, 1, 8, 8, 9, 2, 2, 2, 2, 3, 3, 7)
    assert spans == [(21, 22), (12, 14), (14, 15)]
    assert haystacks.hide([(7,)], [0.5], [], 10) == ((7,), [(10, 11)])
