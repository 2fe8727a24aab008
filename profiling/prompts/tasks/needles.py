"""RULER's eight needle tasks (Hsieh et al. 2024, section 3.1): values by key in a haystack.

A prompt is prefix + head + haystack with needles + question.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from profiling.prompts import haystacks
from profiling.prompts.kind import DEPTH, RULER, SHARE, Evidence, Prompt, Request, Span, task
from profiling.prompts.words import words

_HEAD = (
    "Some secret {what}s stand somewhere in the text below. Remember them, "
    "there is a question about them after it.\n"
)
_NEEDLE = "One of the secret {what}s of {key} is {value}."
_ONE = (
    "\n\nWhat is the secret {what} of {keys}, according to the text? The secret {what} of {keys} is"
)
_MANY = (
    "\n\nWhat are all the secret {what}s of {keys}, according to the "
    "text? The secret {what}s of {keys} are"
)
# What RULER lets a model answer with.
_NEW_TOKENS = 128

Thing = Literal["word", "number", "UUID"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the eight: its haystack, and numbers of keys, values of each, and keys asked for."""

    asks: str
    haystack: Literal["noise", "text", "needles"]
    key: Thing = "word"
    value: Thing = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1


VARIANTS = {
    "niah_single_1": Variant(
        asks="the number of a word, in one line repeated over and over", haystack="noise"
    ),
    "niah_single_2": Variant(asks="the number of a word, in a text", haystack="text"),
    "niah_single_3": Variant(asks="the UUID of a word, in a text", haystack="text", value="UUID"),
    "niah_multikey_1": Variant(
        asks="the number of one of four words with numbers, in a text", haystack="text", keys=4
    ),
    "niah_multikey_2": Variant(
        asks="the number of one word, in a list of words with numbers", haystack="needles"
    ),
    "niah_multikey_3": Variant(
        asks="the UUID of one UUID, in a list of such pairs",
        haystack="needles",
        key="UUID",
        value="UUID",
    ),
    "niah_multivalue": Variant(
        asks="the four numbers of one word, in a text", haystack="text", values=4
    ),
    "niah_multiquery": Variant(
        asks="the numbers of four words, in a text", haystack="text", keys=4, asked=4
    ),
}


def needles(request: Request, *, depth: float | None = None) -> list[Prompt]:
    """Prompts of one of the eight; `depth` is that of the needle where there is one."""
    if request.text is None:
        return request.prompts(lambda rng: _prompt(request, rng, depth))
    text = haystacks.read_file(request)

    def make(rng: random.Random, cell: Span | None) -> Prompt:
        assert cell is not None
        prompt = _prompt(request, rng, depth, lambda room, _: text.within(cell, room))
        return replace(prompt, cell=cell)

    return request.prompts_in(text.cells, make)


def _prompt(
    request: Request,
    rng: random.Random,
    depth: float | None,
    text: haystacks.Haystack | None = None,
) -> Prompt:
    encode = request.encode
    variant = VARIANTS[request.name]
    keys = _things(variant.key, rng)
    values = _things(variant.value, rng)
    pairs = [
        (key, next(values))
        for key in itertools.islice(keys, variant.keys)
        for _ in range(variant.values)
    ]
    targets = rng.sample(list(dict.fromkeys(key for key, _ in pairs)), variant.asked)
    right = [at for key in targets for at, pair in enumerate(pairs) if pair[0] == key]

    if variant.haystack == "text":
        space = " "
    else:
        space = "\n"
    hidden = encode.each([space + _needle(variant, key, value) for key, value in pairs])
    if len(right) == 1:
        form = _ONE
    else:
        form = _MANY
    head = encode(_HEAD.format(what=variant.value))
    question = encode(form.format(what=variant.value, keys=_listed(targets)))
    room = request.room(head, question, *hidden)
    if variant.haystack == "noise":
        text = haystacks.noise(encode)
    elif text is None and variant.haystack == "text":
        text = haystacks.filler(encode)
    elif variant.haystack == "needles":
        text = haystacks.written(
            encode, lambda _: ("\n" + _needle(variant, key, next(values)) for key in keys)
        )
    assert text is not None
    if depth is None:
        depths = [rng.random() for _ in pairs]
    else:
        depths = [depth] * len(pairs)
    items, places = haystacks.hide(hidden, depths, text(room, rng))
    ids, spans = request.assemble(head, items, question)
    evidence = [
        Evidence(f" {pairs[at][1]}", spans[places[at]], lead="," if which else "")
        for which, at in enumerate(right)
    ]
    answers = tuple(pairs[at][1] for at in right)
    return Prompt.answered_by(
        ids,
        *evidence,
        references=answers,
        new_tokens=_NEW_TOKENS,
        text_spans=request.text_spans(spans, [spans[at] for at in places]),
    )


def _needle(variant: Variant, key: str, value: str) -> str:
    return _NEEDLE.format(what=variant.value, key=key, value=value)


def _things(kind: Thing, rng: random.Random) -> Iterator[str]:
    """Words, seven-digit numbers or UUIDs without end, none twice."""
    if kind == "word":
        yield from words(random.Random(rng.random()))
    seen = set()
    while True:
        number = rng.randrange(10**6, 10**7)
        if kind == "number":
            thing = str(number)
        else:
            thing = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if thing not in seen:
            seen.add(thing)
            yield thing


def _listed(things: list[str]) -> str:
    if len(things) == 1:
        return things[0]
    return f"{', '.join(things[:-1])} and {things[-1]}"


for _name, _variant in VARIANTS.items():
    task(
        _name,
        takes_file="may" if _variant.haystack == "text" else "no",
        parameters=(DEPTH,) if "single" in _name else (),
        asks=_variant.asks,
        metric="all",
        scored=SHARE,
        source=RULER,
    )(needles)
