"""The answers of each task, derived from the text of a prompt alone.

A new task needs an entry in SOLVERS, CUES or TEXTS.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def _pass_key(text: str) -> list[str]:
    (key,) = re.findall(r"The pass key is ([1-9]\d{6})\.", text)
    assert text.count(key) == 2
    assert text.endswith("What is the pass key? The pass key is")
    return [key]


def _pair(text: str) -> list[str]:
    data, _, question = text.rpartition("Key:")
    (key,) = re.findall(_UUID, question)
    pairs = dict(re.findall(rf'"({_UUID})": *"({_UUID})"', data))
    assert len(pairs) > 5 and question.endswith('"')
    return [pairs[key]]


def _line(text: str) -> list[str]:
    lines, _, question = text.rpartition("The value of")
    values = re.findall(r"The value of (\S+) is (\d+)\.", lines)
    assert len(dict(values)) == len(values) > 20
    name = re.fullmatch(r" (\S+) is", question)
    assert name is not None
    return [dict(values)[name[1]]]


def _two_stages(text: str) -> list[str]:
    lines, _, question = text.partition("Find the box of the owner first")
    boxes = dict(re.findall(r"(\S+) owns the box (\S+)\.", lines))
    values = dict(re.findall(r"The value of (\S+) is (\d+)\.", lines))
    examples = re.findall(r"(\S+) owns the box (\S+)\. The value of (\S+) is (\d+)\.", question)
    assert len(examples) == 3
    for owner, box, name, value in examples:
        assert boxes[owner] == box == name and values[box] == value
    owner = re.search(r"(\S+) owns the box$", question)
    assert owner is not None
    box = boxes[owner[1]]
    assert box not in question and values[box] not in question
    return [f"{box}. The value of {box} is {values[box]}"]


def _hops(text: str) -> list[str]:
    lines, _, question = text.partition("Answer each question")
    facts = {(a, one): b for a, one, b in re.findall(r"(\w+)'s (\w+) is (\w+)\.", lines)}
    assert len(facts) == 12
    answers = []
    for other, a, one in re.findall(r"Who is the (\w+) of (\w+)'s (\w+)\?", question):
        b = facts[a, one]
        answers.append(f"{b}. {b}'s {other} is {facts[b, other]}")
        examples_right = f"{a}'s {one} is {answers[-1]}." in question
        assert examples_right == (len(answers) < 4)
    assert len(answers) == 4
    return answers[3:]


def _needles(text: str) -> list[str]:
    question = re.findall(r"The secret \w+s? of ([^.]+?) (?:is|are)$", text)[0]
    needles = re.findall(r"One of the secret \w+s of (\S+) is ([\w-]+)\.", text)
    keys = re.split(r", | and ", question)
    return [value for key in keys for name, value in needles if name == key]


def _variables(text: str) -> list[str]:
    shown, _, text = text.rpartition("Variables are assigned")
    example = re.findall(r"variables have it: ([A-Z, ]+[A-Z])", shown)[0].split(", ")
    assert sorted(_traced(shown)) == sorted(example)
    return _traced(text)


def _traced(text: str) -> list[str]:
    values: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        values[name] = values.get(source, source)
    wanted = re.findall(r"have the value (\d+) in", text)[-1]
    return [name for name, value in values.items() if value == wanted]


def _common_words(text: str) -> list[str]:
    *_, shown, text = text.split("Below is a numbered list of words.")
    example = re.findall(r"\d+\. (\w+)", shown.split("often are:")[1])
    assert sorted(_most_frequent(shown)) == sorted(example)
    return _most_frequent(text)


def _most_frequent(text: str) -> list[str]:
    """Most frequent words of a numbered list, as many as its question asks for."""
    lines, _, question = text.partition("Which")
    numbers, words = zip(*re.findall(r"(\d+)\. (\w+)", lines), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
    wanted = int(re.findall(r"(\d+) words", question)[0])
    counts = Counter(words).most_common()
    assert counts[wanted - 1][1] > counts[wanted][1]
    return [word for word, _ in counts[:wanted]]


def _code_words(text: str) -> list[str]:
    code = text.partition("stand for nothing.")[2].partition("Which three")[0]
    counts = Counter(code.replace("...", " ").split()).most_common(4)
    assert counts[2][1] > counts[3][1]
    return [word for word, _ in counts[:3]]


# Number of needles of a task and its questions.
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
# By task: the answers to the question at the end of a prompt's text.
SOLVERS: dict[str, Callable[[str], list[str]]] = {
    "passkey": _pass_key,
    "kv_retrieval": _pair,
    "line_retrieval": _line,
    "line_turns": _line,
    "two_stage_retrieval": _two_stages,
    "multi_hop": _hops,
    **dict.fromkeys(NEEDLES, _needles),
    "vt": _variables,
    "cwe": _common_words,
    "fwe": _code_words,
}
# By task or label: the text before an answer inside a prompt, with the name that it belongs to.
CUES = {
    "line_asked": r"of ([\w-]+) is$",
    "asked": r"of ([\w-]+) is$",
    "chain": r"that of ([\w-]+), which is$",
    "chained": r"that of ([\w-]+), which is$",
    "label_map": r"(\w+):$",
}
# Tasks with answers inside a prompt; those of `facts` have labels.
INSIDE = ("line_asked", "chain", "facts", "label_map")
# Tasks without an answer, and those whose answer is in the user's file.
TEXTS = ("text", "prose", "jsonl")
