"""Questions in a later turn over a context that several of them share: the prefill did not know what would be asked.

After SCBench's shared contexts (Li et al. 2024). A prompt is prefix + head + lines, and as its turn the question. The
lines that questions need are whole; what is too much is cut from the start of one that none needs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from profiling.prompts.kind import QUESTIONS, Find, Kind, Parameter, Prompt, Wanted
from profiling.prompts.tokens import Ids, flat
from profiling.prompts.words import five_digits, words

_BATCH = 256


@dataclass(frozen=True)
class Item:
    """A question with the lines that answer it; `links` are all but the last the way to it."""

    lines: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Layout:
    """What is asked, what stands before and after a context's lines, and items without end."""

    asks: str
    head: str
    tail: str
    items: Callable[[random.Random, int], Iterator[Item]]


def _lines(rng: random.Random, hops: int) -> Iterator[Item]:
    for name in words(rng):
        value = five_digits(rng)
        yield Item((f"The value of {name} is {value}.\n",), f"\nThe value of {name} is", f" {value}")


def _pairs(rng: random.Random, hops: int) -> Iterator[Item]:
    for name in words(rng):
        value = five_digits(rng)
        yield Item((f' "{name}": {value},\n',), f'\nKey: "{name}"\nValue:', f" {value}")


def _chained(rng: random.Random, hops: int) -> Iterator[Item]:
    source = words(rng)
    while True:
        names, value = list(islice(source, hops + 1)), five_digits(rng)
        links = [f"The value of {b} is that of {a}.\n" for a, b in pairwise(names)]
        root = f"The value of {names[0]} is {value}.\n"
        yield Item((root, *links), f"\nThe value of {names[-1]} is", f" {value}")


FORMS = {
    "line_turns": Layout(
        "the number of one word in a list of words with numbers",
        "Below is a list of facts, one a line.\n\n",
        "\n",
        _lines,
    ),
    "kv_turns": Layout(
        "the number of one word in a JSON object of words with numbers", "Below is a JSON object.\n\n{\n", "}\n", _pairs
    ),
    "chain_turns": Layout(
        "the number of a word that has that of another, in a list in any order",
        "Below values are set, one a line, some to that of another, in any order.\n\n",
        "\n",
        _chained,
    ),
}


def turns(wanted: Wanted, *, questions: int = 8, hops: int = 1) -> list[Prompt]:
    """Contexts with `questions` questions each, the last one with what is left of `samples`."""
    made: list[Prompt] = []
    for number in range(-(-wanted.samples // questions)):
        made += _context(wanted, min(questions, wanted.samples - len(made)), hops, wanted.rng(number))
    return made


def _context(wanted: Wanted, count: int, hops: int, rng: random.Random) -> list[Prompt]:
    encode, length, form = wanted.encode, wanted.length, FORMS[wanted.name]
    head, tail = encode.prefix + encode(form.head), encode(form.tail)
    source = form.items(random.Random(rng.random()), hops)
    items: list[Item] = []
    ids: list[list[Ids]] = []
    while sum(len(line) for lines in ids for line in lines) < length:
        more = list(islice(source, _BATCH))
        encoded = iter(encode.each([line for item in more for line in item.lines]))
        items += more
        ids += [[next(encoded) for _ in item.lines] for item in more]
    # Questions of one context have as many tokens each: it leaves the same room before all of them.
    asked = encode.each([item.question for item in items])
    size = Counter(map(len, asked[: max(count, length // 64)])).most_common(1)[0][0]
    room = length - len(head) - len(tail) - size
    # As many items as fit, and the one that is cut.
    taken, used = 0, 0
    while used < room:
        used += sum(map(len, ids[taken]))
        taken += 1
    fit = [at for at in range(taken - 1) if len(asked[at]) == size]
    if len(fit) < count:
        raise wanted.too_small(
            f"it has {len(fit)} of the {count} questions that a context needs; give more tokens, or fewer with "
            f"{wanted.name}@questions=N"
        )
    chosen = rng.sample(fit, count)
    order = [(at, line) for at in range(taken - 1) for line in range(len(ids[at]))]
    rng.shuffle(order)
    last = flat(ids[taken - 1])
    context, spans = [*head, *last[used - room :]], {}
    for at, line in order:
        spans[at, line] = (len(context), len(context) + len(ids[at][line]))
        context += ids[at][line]
    context += tail
    return [Prompt.to_find((*context, *asked[at]), Find(items[at].answer, spans[at, 0]), turn=size) for at in chosen]


_HOPS = Parameter("hops", int, "how many words take a number from another (1)", 1, 100)
KINDS = tuple(
    Kind(
        name=name,
        make=turns,
        parameters=(QUESTIONS, _HOPS) if name == "chain_turns" else (QUESTIONS,),
        asks=form.asks,
        scored="the answer begins with the right one; the question comes in a later turn",
        source="a shared context and later turns: SCBench, Li et al. 2024",
    )
    for name, form in FORMS.items()
)
