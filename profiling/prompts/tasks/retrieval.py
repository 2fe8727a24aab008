"""Prompts that ask for one thing out of many: a value by its key, a number hidden in a text.

A prompt is prefix + head + haystack + question. Head and question are whole; excess tokens are cut
from the start of the haystack.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterable
from itertools import islice

from profiling.prompts.kind import DEPTH, QUESTION_FIRST, Evidence, Prompt, Request, Span, task
from profiling.prompts.text_files import cells, read_ids, read_text
from profiling.prompts.tokens import Encoder, Ids, enough, flat
from profiling.prompts.words import sentences

_KV_HEAD = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
)
_KV_QUESTION = '\n\nKey: "{key}"\nCorresponding value: "'
_KEY_HEAD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n\n"
)
_KEY_NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
_KEY_QUESTION = "\n\nWhat is the pass key? The pass key is"
_KV_FIRST = 'You will be asked for the value of the key "{key}".\n\n'
_KV_BACK = '\n\nThe value that was asked for at the start: "'
_BATCH = 256


@task(
    "kv_retrieval",
    parameters=(QUESTION_FIRST,),
    asks="the value of one key of a JSON object; keys and values are UUIDs",
    source="Liu et al. 2023, section 3",
)
def kv_retrieval(request: Request, *, question_first: int = 0) -> list[Prompt]:
    """Ask for the value of one key in a JSON object of UUIDs.

    With `question_first`, the key is named only before the object.
    """
    return request.prompts(lambda rng: _key_values(request, rng, bool(question_first)))


@task(
    "passkey",
    takes_file="may",
    parameters=(DEPTH,),
    asks="a seven-digit number hidden in a text",
    source="Mohtashami & Jaggi 2023",
)
def passkey(request: Request, *, depth: float | None = None) -> list[Prompt]:
    """Hide a seven-digit key at some depth of a text, the user's or a generated one.

    The same seed hides the same key in the same text at every depth, so that depths can be
    compared.
    """
    encode = request.encode
    hay = Hay(request)
    head = encode(_KEY_HEAD)
    question = encode(_KEY_QUESTION)

    def make_prompt(rng: random.Random, cell: Span | None) -> Prompt:
        key = str(rng.randrange(10**6, 10**7))
        needle = encode(_KEY_NEEDLE.format(key=key))
        room = request.room(head, needle, question)
        anywhere = rng.randint(0, room)
        text = hay.tokens(room, rng, cell)
        if depth is None:
            at = anywhere
        else:
            at = round(depth * room)
        ids, spans = request.assemble(head, [text[:at], needle, text[at:]], question)
        return Prompt.answered_by(
            ids,
            Evidence(f" {key}", spans[1]),
            text_spans=request.text_spans(spans, [spans[1]]),
            cell=cell,
        )

    return request.prompts_in(hay.cells, make_prompt)


def _key_values(request: Request, rng: random.Random, first: bool) -> Prompt:
    encode = request.encode
    plain = encode(_KV_HEAD)
    tail = encode("}")
    pairs: list[tuple[str, str]] = []
    items: list[Ids] = []
    while sum(map(len, items)) < request.length:
        more = [(_uuid(rng), _uuid(rng)) for _ in range(_BATCH)]
        items += encode.each([f',\n "{key}": "{value}"' for key, value in more])
        pairs += more
    # UUIDs differ in tokens, so each question leaves other pairs whole.
    for at in rng.sample(range(len(pairs)), len(pairs)):
        key, value = pairs[at]
        head = plain
        question = tail + encode(_KV_QUESTION.format(key=key))
        if first:
            head = encode(_KV_FIRST.format(key=key) + _KV_HEAD)
            question = tail + encode(_KV_BACK)
        ids, spans = request.assemble(head, items, question)
        start, stop = spans[at]
        if stop - start == len(items[at]):
            return Prompt.answered_by(ids, Evidence(value, spans[at]))
    mean = sum(map(len, items)) // len(items)
    needed = len(encode.prefix) + len(head) + len(question) + mean
    raise request.too_small(f"one pair and its question take {needed}")


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


class Hay:
    """Tokens to hide something in: disjoint windows of the user's text, or generated.

    Attributes:
        text: the user's; empty where it is generated.
        cells: of the user's text, one for each prompt; None without end where it is generated.
    """

    def __init__(self, request: Request) -> None:
        """Read the text.

        Raises:
            HeadwiseError: it is empty, or no text.
        """
        self._request = request
        self._ids: Ids = ()
        self.text = ""
        self.cells: Iterable[Span | None] = itertools.repeat(None)
        if request.text:
            self.text = read_text(request.text)
            self._ids = read_ids(request.encode, request.text)
            self.cells = cells(request, len(self._ids))

    def tokens(self, room: int, rng: random.Random, cell: Span | None) -> Ids:
        """Take `room` tokens of a cell, or generate them where it is None.

        Raises:
            HeadwiseError: the text has fewer.
        """
        if cell is None:
            return _generated(self._request.encode, room, rng)
        start, end = cell
        if end - start < room:
            raise self._request.too_short(len(self._ids), room)
        return self._ids[start : start + room]


def _generated(encode: Encoder, count: int, rng: random.Random) -> Ids:
    """The last `count` tokens of enough sentences."""
    source = sentences(rng)
    batches = ("".join(islice(source, _BATCH)) for _ in itertools.count())
    ids = flat(enough(map(encode, batches), count))
    return ids[len(ids) - count :]
