"""Prompts that ask for one thing out of many: a value by its key, a number hidden in a text.

A prompt is prefix + head + haystack + question. Head and question are whole; what is too much is cut from the
start of the haystack.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from artifacts import HeadwiseError
from profiling.prompts.filler import sentences
from profiling.prompts.prompt import Find, Prompt
from profiling.prompts.texts import read_ids, read_text
from profiling.prompts.tokens import Encoder, Ids
from profiling.prompts.words import names, words

_KV_HEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
_KV_QUESTION = '\n\nKey: "{key}"\nCorresponding value: "'
_KEY_HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n\n"
)
_KEY_NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
_KEY_QUESTION = "\n\nWhat is the pass key? The pass key is"
_NUMBER_HEAD = (
    "Somewhere in the text below there is a sequence of digits. Keep it in mind: you will be asked for it.\n\n"
)
_NUMBER_NEEDLE = "\nThe sequence of digits is {number}. Once more: {number} is the sequence of digits.\n"
_NUMBER_QUESTION = "\n\nWhat is the sequence of digits? The sequence of digits is"
_NEEDLE_HEAD = "Read the text below. There is a question about it at the end.\n\n"
_NEEDLE = "\nThe thing that {who} likes best in {where} is the {what}.\n"
_NEEDLE_QUESTION = "\n\nWhat does {who} like best in {where}? The thing that {who} likes best in {where} is the"
_NEEDLE_FIRST = "Question: What does {who} like best in {where}? The answer is in the text.\n\n"
_NEEDLE_BACK = "\n\nThe answer to the question at the start: it is the"
_KV_FIRST = 'You will be asked for the value of the key "{key}".\n\n'
_KV_BACK = '\n\nThe value that was asked for at the start: "'
_DIGITS = 10
_BATCH = 256


@dataclass(frozen=True)
class _Hidden:
    """What is put into a text: `head` stands before the text, `question` after it, `needle` somewhere in it."""

    head: str
    needle: str
    question: str
    expected: str


def kv_retrieval(
    encode: Encoder, file: Path | None, length: int, samples: int, seed: int, *, question_first: int = 0
) -> list[Prompt]:
    """A JSON object with UUIDs for keys and values, then one of its keys; the answer is that key's value.

    With `question_first` the key stands before the object only.
    """
    rngs = [random.Random(f"{seed} kv_retrieval {i}") for i in range(samples)]
    return [_key_values(encode, length, rng, bool(question_first)) for rng in rngs]


def passkey(
    encode: Encoder, file: Path | None, length: int, samples: int, seed: int, *, depth: float | None = None
) -> list[Prompt]:
    """A seven-digit key at some depth of a text (the user's, or a generated one), then the question for it."""

    def key(rng: random.Random, text: str) -> _Hidden:
        key = str(rng.randrange(10**6, 10**7))
        return _Hidden(_KEY_HEAD, _KEY_NEEDLE.format(key=key), _KEY_QUESTION, key)

    return _hidden("passkey", key, encode, file, length, samples, seed, depth)


def number(
    encode: Encoder, file: Path | None, length: int, samples: int, seed: int, *, depth: float | None = None
) -> list[Prompt]:
    """Ten digits at some depth of a text, each like the one before it half of the time: harder to copy than a key."""

    def digits(rng: random.Random, text: str) -> _Hidden:
        found = rng.choice("123456789")
        while len(found) < _DIGITS:
            found += found[-1] if rng.random() < 0.5 else rng.choice("0123456789")
        return _Hidden(_NUMBER_HEAD, _NUMBER_NEEDLE.format(number=found), _NUMBER_QUESTION, found)

    return _hidden("number", digits, encode, file, length, samples, seed, depth)


def needle(
    encode: Encoder,
    file: Path | None,
    length: int,
    samples: int,
    seed: int,
    *,
    depth: float | None = None,
    question_first: int = 0,
) -> list[Prompt]:
    """A sentence about somebody who is not in the text, at some depth of it, then the question for what it says.

    With `question_first` the question stands before the text only.
    """

    def sentence(rng: random.Random, text: str) -> _Hidden:
        who, where = names(rng, 2, apart_from=text)
        what = next(words(rng))
        said = _NEEDLE.format(who=who, where=where, what=what)
        if question_first:
            return _Hidden(_NEEDLE_FIRST.format(who=who, where=where), said, _NEEDLE_BACK, what)
        return _Hidden(_NEEDLE_HEAD, said, _NEEDLE_QUESTION.format(who=who, where=where), what)

    return _hidden("needle", sentence, encode, file, length, samples, seed, depth)


def _key_values(encode: Encoder, length: int, rng: random.Random, first: bool) -> Prompt:
    plain, tail = encode.prefix + encode(_KV_HEAD), encode("}")
    pairs: list[tuple[str, str]] = []
    haystack: list[int] = []
    starts: list[int] = []
    while len(haystack) < length:
        more = [(_uuid(rng), _uuid(rng)) for _ in range(_BATCH)]
        for ids in encode.each([f',\n "{key}": "{value}"' for key, value in more]):
            starts.append(len(haystack))
            haystack += ids
        pairs += more
    # UUIDs differ in tokens, so each question leaves other pairs whole.
    for chosen in rng.sample(range(len(pairs)), len(pairs)):
        key, value = pairs[chosen]
        head = encode.prefix + encode(_KV_FIRST.format(key=key) + _KV_HEAD) if first else plain
        question = tail + encode(_KV_BACK) if first else tail + encode(_KV_QUESTION.format(key=key))
        cut = len(haystack) + len(head) + len(question) - length
        if starts[chosen] >= cut:
            end = starts[chosen + 1] if chosen + 1 < len(starts) else len(haystack)
            span = (len(head) + starts[chosen] - cut, len(head) + end - cut)
            return Prompt.to_find((*head, *haystack[cut:], *question), Find(value, span))
    needed = len(head) + len(question) + len(haystack) // len(pairs)
    raise HeadwiseError(f"length {length} is too small for kv_retrieval: one pair and its question take {needed}")


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _hidden(
    task: str,
    make: Callable[[random.Random, str], _Hidden],
    encode: Encoder,
    file: Path | None,
    length: int,
    samples: int,
    seed: int,
    depth: float | None,
) -> list[Prompt]:
    """The same seed hides the same thing in the same text at every depth, so that depths can be compared."""
    text = read_text(file) if file is not None else ""
    ids = read_ids(encode, file) if file is not None else None

    def one(rng: random.Random) -> Prompt:
        hidden = make(rng, text)
        needle, question = encode(hidden.needle), encode(hidden.question)
        head = encode.prefix + encode(hidden.head)
        room = length - len(head) - len(needle) - len(question)
        if room < 0:
            raise HeadwiseError(f"length {length} is too small for {task}: give at least {length - room}")
        at = rng.randint(0, room)
        hay = haystack(encode, ids, file, room, rng, f"{task} at length {length}")
        at = at if depth is None else round(depth * room)
        start = len(head) + at
        whole = (*head, *hay[:at], *needle, *hay[at:], *question)
        return Prompt.to_find(whole, Find(f" {hidden.expected}", (start, start + len(needle))))

    return [one(random.Random(f"{seed} {task} {i}")) for i in range(samples)]


def haystack(encode: Encoder, text: Ids | None, file: Path | None, room: int, rng: random.Random, purpose: str) -> Ids:
    """`room` tokens to hide something in: of the text of the file, from a random place on, or generated ones."""
    if text is None:
        return _generated(encode, room, rng)
    if len(text) < room:
        assert file is not None
        raise HeadwiseError(f"{file.name} is too short for {purpose}: it has {len(text)} tokens, {room} are needed")
    start = rng.randint(0, len(text) - room)
    return text[start : start + room]


def _generated(encode: Encoder, count: int, rng: random.Random) -> Ids:
    """The last `count` tokens of enough sentences."""
    source = sentences(rng)
    ids: list[int] = []
    while len(ids) < count:
        ids += encode("".join(next(source) for _ in range(_BATCH)))
    return tuple(ids[len(ids) - count :])
