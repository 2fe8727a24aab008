"""Prompts that come back to what is far before, again and again, and say it themselves: one prefill, many answers.

A prompt is prefix + head + items. An item is new or comes back to one that began at least a quarter of the prompt
before it; what it says then follows from that one alone, and these tokens are the prompt's `scored` ranges. They are
predicted by the prefill itself, so dense attention of the last queries cannot stand in for the pattern. What is too
much is cut from the first items, to which nothing comes back. The last 128 tokens have no scored range.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from artifacts import HeadwiseError
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder
from profiling.prompts.words import compounds, plain_words, words

# Items come back from further than this share of the prompt.
FAR = 4
# Last tokens without a scored range: more than any dense tail in use.
_TAIL = 128
# First items, which may be cut.
_CUT = 8
_LABELS = "red blue green black white yellow brown pink gold grey"
_PASSAGE, _CUE = 24, 4
# Words of an entry in a dictionary.
_ENTRY = 5


@dataclass(frozen=True)
class Thing:
    """What items speak of: a name, and what is to be recalled with it, its leading space included."""

    name: str
    value: str


@dataclass(frozen=True)
class Form:
    """How items are written: text before the value, and after it.

    things: without end, none twice; those of one prompt.
    new: of a thing that is new. again: of one that comes back, where an item may give its value to a new name.
    gives: whether that item is one to come back to under its new name.
    """

    head: str
    things: Callable[[random.Random], Iterator[Thing]]
    new: tuple[str, str]
    again: tuple[str, str]
    gives: bool = False


def _numbered(source: Callable[[random.Random], Iterator[str]]) -> Callable[[random.Random], Iterator[Thing]]:
    return lambda rng: (Thing(name, f" {rng.randrange(10**4, 10**5)}") for name in source(rng))


def _labelled(rng: random.Random) -> Iterator[Thing]:
    labels = _LABELS.split()
    return (Thing(name, f" {rng.choice(labels)}") for name in compounds(rng))


def _entries(rng: random.Random) -> Iterator[Thing]:
    source = plain_words()
    return (Thing(name, "".join(f" {rng.choice(source)}" for _ in range(_ENTRY))) for name in compounds(rng))


def _passages(rng: random.Random) -> Iterator[Thing]:
    source = plain_words()
    while True:
        chosen = [rng.choice(source) for _ in range(_PASSAGE)]
        yield Thing(" ".join(chosen[:_CUE]), "".join(f" {word}" for word in chosen[_CUE:]))


FORMS = {
    "line_asked": Form(
        "Below are facts, one a line, and questions about earlier ones with their answers.\n\n",
        _numbered(words),
        ("The value of {name} is", ".\n"),
        ("Question: What is the value of {name}? Answer: The value of {name} is", ".\n"),
    ),
    "chain": Form(
        "Below values are set, one a line, some of them to the value of an earlier one.\n\n",
        _numbered(words),
        ("The value of {name} is", ".\n"),
        ("The value of {new} is that of {name}, which is", ".\n"),
        gives=True,
    ),
    "label_map": Form(
        "Each word has a colour, which stays the same wherever the word comes again.\n\n",
        _labelled,
        ("{name}:", "\n"),
        ("{name}:", "\n"),
    ),
    "dictionary": Form(
        "Below is a dictionary. A word that comes again has the same entry again.\n\n",
        _entries,
        ("{name}:", ".\n"),
        ("{name}:", ".\n"),
    ),
    "repeats": Form("", _passages, ("\n{name}", ".\n"), ("\n{name}", ".\n")),
}


def recalls(encode: Encoder, file: Path | None, length: int, samples: int, seed: int, *, form: str) -> list[Prompt]:
    """Prompts of one of FORMS."""
    return [_one(encode, form, length, random.Random(f"{seed} {form} {i}")) for i in range(samples)]


def _one(encode: Encoder, name: str, length: int, rng: random.Random) -> Prompt:
    form = FORMS[name]
    head = encode.prefix + encode(form.head)
    room = length - len(head)
    things = form.things(random.Random(rng.random()))
    ids: list[int] = []
    # Where each thing began that may come back, in order; what was recalled goes to the end of the line.
    known: list[tuple[int, Thing]] = []
    scored: list[tuple[int, int]] = []
    items = 0
    while len(ids) < room:
        due = range(bisect_right(known, len(ids) - length // FAR, key=itemgetter(0)))
        back = bool(due) and len(ids) >= room // 2 and items % 2 == 0
        if back:
            _, thing = known.pop(rng.choice(due))
            new = next(things)
            before, after = (text.format(name=thing.name, new=new.name) for text in form.again)
            said = Thing(new.name, thing.value) if form.gives else thing
        else:
            said = next(things)
            before, after = (text.format(name=said.name) for text in form.new)
        parts = encode.each([before, said.value, after])
        if back:
            scored.append((len(ids) + len(parts[0]), len(ids) + len(parts[0]) + len(parts[1])))
        if items >= _CUT:
            known.append((len(ids), said))
        ids += [token for part in parts for token in part]
        items += 1
    cut = len(ids) - room
    ranges = [(len(head) + start - cut, len(head) + stop - cut) for start, stop in scored]
    ranges = [(start, stop) for start, stop in ranges if stop <= length - _TAIL]
    if room < 1 or not ranges:
        raise HeadwiseError(f"length {length} is too small for {name}: nothing can come back in it; try {2 * length}")
    return Prompt((*head, *ids[cut:]), None, scored=tuple(ranges))
