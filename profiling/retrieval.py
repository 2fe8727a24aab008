"""Prompts that ask for one thing out of many: a value by its key, a number hidden in a text.

A prompt is prefix + head + haystack + question. Head and question are whole; what is too much is cut from the
start of the haystack.
"""

from __future__ import annotations

import random
import uuid
from pathlib import Path

from artifacts import HeadwiseError
from profiling.filler import sentences
from profiling.prompts import Find, Prompt
from profiling.texts import read_ids
from profiling.tokens import Encoder, Ids

_KV_HEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
_KV_QUESTION = '\n\nKey: "{key}"\nCorresponding value: "'
_KEY_HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n\n"
)
_KEY_NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
_KEY_QUESTION = "\n\nWhat is the pass key? The pass key is"
_BATCH = 256


def kv_retrieval(encode: Encoder, file: Path | None, length: int, samples: int, seed: int) -> list[Prompt]:
    """A JSON object with UUIDs for keys and values, then one of its keys; the answer is that key's value."""
    return [_key_values(encode, length, random.Random(f"{seed} kv_retrieval {i}")) for i in range(samples)]


def passkey(encode: Encoder, file: Path | None, length: int, samples: int, seed: int) -> list[Prompt]:
    """A seven-digit key at a random depth of a text (the user's, or a generated one), then the question for it."""
    text = read_ids(encode, file) if file is not None else None
    return [_hidden_key(encode, text, file, length, random.Random(f"{seed} passkey {i}")) for i in range(samples)]


def _key_values(encode: Encoder, length: int, rng: random.Random) -> Prompt:
    head, tail = encode.prefix + encode(_KV_HEAD), encode("}")
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
        question = tail + encode(_KV_QUESTION.format(key=key))
        cut = len(haystack) + len(head) + len(question) - length
        if starts[chosen] >= cut:
            end = starts[chosen + 1] if chosen + 1 < len(starts) else len(haystack)
            span = (len(head) + starts[chosen] - cut, len(head) + end - cut)
            return Prompt.to_find((*head, *haystack[cut:], *question), Find(value, span))
    needed = len(head) + len(question) + len(haystack) // len(pairs)
    raise HeadwiseError(f"length {length} is too small for kv_retrieval: one pair and its question take {needed}")


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _hidden_key(encode: Encoder, text: Ids | None, file: Path | None, length: int, rng: random.Random) -> Prompt:
    key = str(rng.randrange(10**6, 10**7))
    needle = encode(_KEY_NEEDLE.format(key=key))
    head = encode.prefix + encode(_KEY_HEAD)
    question = encode(_KEY_QUESTION)
    room = length - len(head) - len(needle) - len(question)
    if room < 0:
        raise HeadwiseError(f"length {length} is too small for passkey: give at least {length - room}")
    depth = rng.randint(0, room)
    hay = haystack(encode, text, file, room, rng, f"passkey at length {length}")
    start = len(head) + depth
    ids = (*head, *hay[:depth], *needle, *hay[depth:], *question)
    return Prompt.to_find(ids, Find(f" {key}", (start, start + len(needle))))


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
