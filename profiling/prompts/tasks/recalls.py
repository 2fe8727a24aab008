"""Prompts that recall far tokens again and again: one prefill, many answers.

A prompt is prefix + head + items. An item is new or comes back to one that began at least a quarter
of the prompt before it; its value then follows from that one alone, and these tokens are the
prompt's `scored` ranges. They are predicted by the prefill itself, so dense attention of the last
queries cannot replace the pattern. Excess tokens are cut from the first items, to which
nothing comes back. The last 128 tokens have no scored range. A form may ask in a later turn as
well: then several prompts share a context, and the first of them has its scored ranges.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter

from profiling.prompts.kind import (
    BEGINS,
    QUESTIONS,
    Evidence,
    LengthTooShort,
    Prompt,
    Request,
    task,
)
from profiling.prompts.tokens import Ids
from profiling.prompts.words import compounds, words

# Items come back from at least length / FAR tokens before.
FAR = 4
# Last tokens without a scored range: more than any dense tail in use.
_TAIL = 128
# First items, which may be cut.
_CUT = 8
_LABELS = "red blue green black white yellow brown pink gold grey"
# Names by which the usual length of a question is known.
_NAMES = 64
# Draws of a context until enough can come back. Of 1,024 tokens one in 150 needs a second one.
_DRAWS = 16


@dataclass(frozen=True)
class Thing:
    """A name, and the value to be recalled with it, its leading space included."""

    name: str
    value: str


@dataclass(frozen=True)
class Again:
    """Form of an item that comes back: text before the value, and after it.

    Attributes:
        assigns: whether it assigns the value to a new name, which may come back later.
        label: of these answers, where a form has several kinds of them.
    """

    before: str
    after: str
    assigns: bool = False
    label: str = ""


@dataclass(frozen=True)
class Form:
    """Forms of a task's items.

    Attributes:
        asks, source: see TaskSpec.
        things: without end, none twice; those of one prompt.
        new: of a thing that is new, text before the value and after it.
        again: of one that comes back, in turn.
        every: one in `every` items of the second half comes back.
        turn: the question of a later turn; empty for none.
    """

    asks: str
    source: str
    head: str
    things: Callable[[random.Random], Iterator[Thing]]
    new: tuple[str, str]
    again: tuple[Again, ...]
    every: int = 2
    turn: str = ""


def _numbered(
    source: Callable[[random.Random], Iterator[str]],
) -> Callable[[random.Random], Iterator[Thing]]:
    return lambda rng: (Thing(name, f" {rng.randrange(10**4, 10**5)}") for name in source(rng))


def _labelled(rng: random.Random) -> Iterator[Thing]:
    labels = _LABELS.split()
    return (Thing(name, f" {rng.choice(labels)}") for name in compounds(rng))


_FACT = ("The value of {name} is", ".\n")
_ASKED = Again(
    "Question: What is the value of {name}? Answer: The value of {name} is", ".\n", label="asked"
)
_CHAINED = Again(
    "The value of {new} is that of {name}, which is", ".\n", assigns=True, label="chained"
)
FORMS = {
    "line_asked": Form(
        "the numbers of earlier words, by questions between the lines of a list",
        "LongEval, Li et al. 2023",
        "Below are facts, one a line, and questions about earlier ones with their answers.\n\n",
        _numbered(words),
        _FACT,
        (_ASKED,),
    ),
    "chain": Form(
        "the number of a new word, which is that of a word far before it",
        "variable tracking, RULER",
        "Below values are set, one a line, some of them to the value of an earlier one.\n\n",
        _numbered(words),
        _FACT,
        (_CHAINED,),
    ),
    "facts": Form(
        "the questions of `line_asked` and `chain` in one prompt, and more in later turns",
        "LongEval, Li et al. 2023; RULER, Hsieh et al. 2024",
        "Below values are set, one a line, some of them to the value of an earlier one, and some "
        "are asked for.\n\n",
        _numbered(words),
        _FACT,
        (_ASKED, _CHAINED),
        every=1,
        turn="\nThe value of {name} is",
    ),
    "label_map": Form(
        "the random label of a word that appeared far before",
        "many-shot, Agarwal et al. 2024",
        "Each word has a colour, which stays the same wherever the word comes again.\n\n",
        _labelled,
        ("{name}:", "\n"),
        (Again("{name}:", "\n"),),
    ),
}


def recalls(request: Request, *, questions: int = 8) -> list[Prompt]:
    """Make prompts of one of FORMS; `questions` share a context where it asks in a later turn."""
    if not FORMS[request.name].turn:
        questions = 1
    prompts: list[Prompt] = []
    for number in range(-(-request.samples // questions)):
        prompts += _drawn(
            request, min(questions, request.samples - len(prompts)), request.rng(number)
        )
    return prompts


def _drawn(request: Request, count: int, rng: random.Random) -> list[Prompt]:
    """A context; one of whose things too few can come back is drawn again."""
    for _ in range(_DRAWS - 1):
        with suppress(LengthTooShort):
            return _context(request, count, rng)
    return _context(request, count, rng)


def _context(request: Request, count: int, rng: random.Random) -> list[Prompt]:
    encode = request.encode
    length = request.length
    form = FORMS[request.name]
    head = encode(form.head)
    named = rng.random()
    things = form.things(random.Random(named))
    # Questions of one context have as many tokens each: it leaves the same room before all of them.
    size = 0
    if form.turn:
        likely = islice(form.things(random.Random(named)), _NAMES)
        turns = encode.each([form.turn.format(name=thing.name) for thing in likely])
        size = Counter(map(len, turns)).most_common(1)[0][0]
    room = length - len(encode.prefix) - len(head) - size
    taken = 0
    parts: list[Ids] = []
    # The start of each thing that may come back, in order; a recalled thing moves to the end of the
    # queue.
    starts: list[tuple[int, Thing]] = []
    # Of a thing its first part, and of an answer its part with its label.
    lines: dict[Thing, int] = {}
    scored: list[tuple[int, str]] = []
    items = 0
    while taken < room:
        due = range(bisect_right(starts, taken - length // FAR, key=itemgetter(0)))
        back = bool(due) and taken >= room // 2 and items % form.every == 0
        if back:
            again = form.again[len(scored) % len(form.again)]
            _, thing = starts.pop(rng.choice(due))
            new = next(things)
            before, after = (
                text.format(name=thing.name, new=new.name) for text in (again.before, again.after)
            )
            if again.assigns:
                said = Thing(new.name, thing.value)
            else:
                said = thing
        else:
            said = next(things)
            before, after = (text.format(name=said.name) for text in form.new)
        if back:
            scored.append((len(parts) + 1, again.label))
        if items >= _CUT:
            starts.append((taken, said))
            lines[said] = len(parts)
        own = encode.each([before, said.value, after])
        parts += own
        taken += sum(map(len, own))
        items += 1
    targets = [
        thing for _, thing in starts if len(encode(form.turn.format(name=thing.name))) == size
    ]
    if room < 1 or (size and len(targets) < count):
        raise request.too_small(f"nothing can come back in it; try {2 * length}")
    # A question of as many tokens as any of them.
    ids, spans = request.assemble(head, parts, (0,) * size)
    ranges = [(spans[at], label) for at, label in scored]
    ranges = [(span, label) for span, label in ranges if span[1] <= length - size - _TAIL]
    if not ranges:
        raise request.too_small(f"nothing can come back in it; try {2 * length}")
    scored_spans = tuple(span for span, _ in ranges)
    if not form.turn:
        return [Prompt(ids, None, scored=scored_spans)]
    prompts = []
    for thing in rng.sample(targets, count):
        ids, spans = request.assemble(head, parts, encode(form.turn.format(name=thing.name)))
        line = lines[thing]
        fact = Evidence(thing.value, (spans[line][0], spans[line + 2][1]))
        prompts.append(Prompt.answered_by(ids, fact, turn=size))
    labels = tuple(label for _, label in ranges)
    return [replace(prompts[0], scored=scored_spans, labels=labels), *prompts[1:]]


_INSIDE = "fraction of in-prompt answers whose tokens are all argmax (teacher-forced)"
_LATER = f"; in later turns, {BEGINS}"
for _name, _form in FORMS.items():
    task(
        _name,
        parameters=(QUESTIONS,) if _form.turn else (),
        asks=_form.asks,
        scored=_INSIDE + (_LATER if _form.turn else ""),
        source=_form.source,
    )(recalls)
