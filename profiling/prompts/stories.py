"""Sparse Frontier's story tasks (Nawrot et al. 2025): chapters of one traveller's purchases.

A prompt is prefix + padding + instruction + question + chapters + question; as many chapters as
fit. Retrieval asks for places, people and items of chapters, multihop for the item bought just
before another, filtering for the chapters in which nothing is bought.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from profiling.prompts.haystacks import laid_out, whole_items
from profiling.prompts.kind import Kind, Parameter, Prompt, Request
from profiling.prompts.words import names, sentences

_HERO = "Mirabel"
_HEAD = (
    f"The context holds chapters about {_HERO}'s travels. Answer from it, "
    f"within <answer> and </answer>.\n\n"
)
_OPEN = "\n<context>\n"
_CLOSE = "</context>\n"
_ANSWER = "\n<answer>"
_END = "\n</answer>"
_BOUGHT = f" {_HERO} bought the {{}}."
_SOLD = " She sold the {}."
_KINDS = (
    "amber brass clay copper cotton glass granite ivory leather linen "
    "oak paper pine silk silver wool"
)
_LOOKS = (
    "ancient bent bright broad carved chipped cracked dark dusty faded fancy folded gilded heavy "
    "hollow large light "
    "long matte narrow odd painted pale plain polished rare rough round rusty scented short slim "
    "small smooth spotted "
    "square striped tall thin tiny worn"
)
_THINGS = (
    "basin bell belt bowl box brooch brush button candle chair chest clock comb cup dish drum fan "
    "flute frame glove "
    "hat horn kite knife ladle lamp mask mirror mug necklace pipe plate purse ring rug saddle "
    "scarf spoon tray vase"
)
_PLACES = [
    f"{what} of {where}"
    for what in (
        "harbour",
        "market",
        "castle",
        "bridge",
        "garden",
        "square",
        "abbey",
        "mill",
        "tower",
        "inn",
    )
    for where in ("Arvel", "Bremo", "Cadiss", "Dorne", "Elmar", "Fenwick", "Garro", "Hallin")
]
_EVENTS = (
    "fair",
    "wedding",
    "sale",
    "concert",
    "race",
    "feast",
    "parade",
    "play",
    "trial",
    "harvest",
)
_PEOPLE = 250
_EMPTY = 3
_SLACK = 24


class Chapter(NamedTuple):
    """A chapter of a story.

    Attributes:
        item: what is bought.
        sold: of what was bought before, what is sold again.
    """

    place: str
    person: str
    item: str
    text: str
    sold: str | None = None


class StoryQuestion(NamedTuple):
    """A question and its answer, which stands between the tags, with the metric's references."""

    text: str
    answer: str
    references: tuple[str, ...]
    choices: tuple[str, ...] = ()


def stories(request: Request, *, asked: int = 16) -> list[Prompt]:
    """Prompts of one of FORMS; `asked` is how many numbered questions retrieval has."""
    encode = request.encode
    length = request.length
    form = request.name.partition("_")[2]
    head = encode(_HEAD)
    opened = encode(_OPEN)
    closed = encode(_CLOSE)

    def make_prompt(rng: random.Random) -> Prompt:
        # Chapters that might be, for the size of a question.
        possible = [
            Chapter(max(_PLACES, key=len), "Nobody", "item", "")
            for _ in range(max(4, length // 60))
        ]
        size = len(encode(_sized(form, possible, asked))) + _SLACK
        room = request.room(head, opened, closed, encode(_ANSWER), least=2 * size) - 2 * size
        made: list[Chapter] = []
        texts = whole_items(encode, _chapters(made, rng), room)
        made = made[: len(texts)]
        if len(made) < _EMPTY + 1 or (form == "retrieval" and 3 * len(made) < asked):
            raise request.too_small(f"it has {len(made)} chapters; try {2 * length}")
        if form == "filtering":
            empty = set(rng.sample(range(len(made)), _EMPTY))
        else:
            empty = set[int]()
        never = {made[at].item for at in empty}
        for at, chapter in enumerate(made if never else ()):
            if at in empty or chapter.sold in never:
                text = chapter.text
                if chapter.sold in never:
                    text = text.replace(_SOLD.format(chapter.sold), "")
                if at in empty:
                    text = text.replace(_BOUGHT.format(chapter.item), "")
                texts[at] = encode(_titled(at, text))
        question = FORMS[form](made, empty, asked, rng)
        said = encode(f"{question.text}\n")
        ids = laid_out(request, head, said, opened, *texts, closed, said, encode(_ANSWER))
        return Prompt(
            ids,
            question.answer + _END,
            references=question.references,
            choices=question.choices,
        )

    return request.prompts(make_prompt)


def _chapters(made: list[Chapter], rng: random.Random) -> Iterator[str]:
    """Chapters until there are no more items; what is given is put into `made`."""
    items = [
        f"{look} {kind} {thing}"
        for look, kind, thing in product(_LOOKS.split(), _KINDS.split(), _THINGS.split())
    ]
    rng.shuffle(items)
    met = list(product(_PLACES, names(rng, _PEOPLE)))
    rng.shuffle(met)
    talk = sentences(rng)
    owned = list[str]()
    for item, (place, person) in zip(items, met, strict=False):
        talked = " ".join(next(talk).strip() for _ in range(3))
        text = (
            f"{_HERO} came to the {place} for a {rng.choice(_EVENTS)} and met "
            f"{person}. {talked}{_BOUGHT.format(item)}"
        )
        sold = None
        if owned and rng.random() < 0.5:
            sold = owned.pop(rng.randrange(len(owned)))
            text += _SOLD.format(sold)
        owned.append(item)
        made.append(Chapter(place, person, item, f"{text} Then they said goodbye.", sold))
        yield _titled(len(made) - 1, made[-1].text)


def _titled(at: int, text: str) -> str:
    return f"Chapter {at + 1}:\n{text}\n"


def _sized(form: str, chapters: list[Chapter], asked: int) -> str:
    """A question as long as one over so many chapters can be."""
    if form == "retrieval":
        return "\n".join(
            [_RETRIEVE, *(_ASKED["place"].format(99, len(chapters)) for _ in range(asked))]
        )
    if form == "multihop":
        return _HOP.format("scented granite necklace")
    return _FILTER


_ASKED = {
    "place": "{0}. Which place did she come to in Chapter {1}?",
    "person": "{0}. Whom did she meet in Chapter {1}?",
    "item": "{0}. What did she buy in Chapter {1}?",
}
_RETRIEVE = "Answer each question in a line with its number."
_HOP = "Which item did she buy just before she bought the {}? Name the item."
_FILTER = "In which chapters did she buy nothing? Give their numbers."


def _retrieval(
    made: list[Chapter], empty: set[int], asked: int, rng: random.Random
) -> StoryQuestion:
    chosen = rng.sample(list(product(range(len(made)), _ASKED)), asked)
    right = [getattr(made[at], kind) for at, kind in chosen]
    lines = [_ASKED[kind].format(n, at + 1) for n, (at, kind) in enumerate(chosen, start=1)]
    answer = "\n".join(f"{n}. {value}" for n, value in enumerate(right, start=1))
    return StoryQuestion("\n".join([_RETRIEVE, *lines]), answer, tuple(right))


def _multihop(
    made: list[Chapter], empty: set[int], asked: int, rng: random.Random
) -> StoryQuestion:
    at = rng.randrange(1, len(made))
    right = made[at - 1].item
    wrong = rng.sample(
        [chapter.item for chapter in made if chapter.item != right], min(3, len(made) - 1)
    )
    choices = tuple(f"{item}{_END}" for item in (right, *wrong))
    return StoryQuestion(_HOP.format(made[at].item), right, (right,), choices)


def _filtering(
    made: list[Chapter], empty: set[int], asked: int, rng: random.Random
) -> StoryQuestion:
    right = [str(at + 1) for at in sorted(empty)]
    wrong = (sorted(rng.sample(range(len(made)), _EMPTY)) for _ in range(3))
    lists = dict.fromkeys(
        [", ".join(right), *(", ".join(str(at + 1) for at in each) for each in wrong)]
    )
    choices = tuple(f"{numbers}{_END}" for numbers in lists)
    return StoryQuestion(_FILTER, ", ".join(right), tuple(right), choices)


FORMS: dict[str, Callable[[list[Chapter], set[int], int, random.Random], StoryQuestion]] = {
    "retrieval": _retrieval,
    "multihop": _multihop,
    "filtering": _filtering,
}


def _kind(form: str, metric: str, asks: str, scored: str, *parameters: Parameter) -> Kind:
    return Kind(
        name=f"story_{form}",
        make=stories,
        metric=metric,
        parameters=parameters,
        asks=asks,
        scored=scored,
        source="Sparse Frontier, Nawrot et al. 2025",
    )


KINDS = (
    _kind(
        "retrieval",
        "numbered",
        "places, people and items of chapters of a story",
        "the fraction of the numbered answers that are right",
        Parameter("asked", int, "how many answers (16)", 1, 1000),
    ),
    _kind("multihop", "item", "the item that was bought just before another", "the item is named"),
    _kind(
        "filtering",
        "chapters",
        "the chapters in which nothing is bought",
        "intersection over union; both empty is 1",
    ),
)
