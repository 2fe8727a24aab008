"""BABILong (Kuratov et al. 2024): facts in bAbI's manner (Weston et al. 2015) over a text.

A prompt is prefix + worked examples + text with facts + question. The text is the user's or a
generated one. 1 asks where somebody is, 2 where a thing is that somebody carried, 3 where it was
before it came to a place.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

from profiling.prompts import haystacks
from profiling.prompts.kind import Kind, Prompt, Request

_PEOPLE = ("Mary", "John", "Sandra", "Daniel")
_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_THINGS = ("football", "apple", "milk")
_GO = ("moved to", "went to", "travelled to", "journeyed to")
_HEAD = (
    "Facts about people and things are hidden in the text below. Where there are several, the last "
    "one holds. "
    "Questions are answered by one word.\n"
)
_QUESTION = {
    1: "\n\nQuestion: Where is {0}?\nAnswer: {0} is in the",
    2: "\n\nQuestion: Where is the {0}?\nAnswer: The {0} is in the",
    3: "\n\nQuestion: Where was the {0} before the {1}?\nAnswer: Before the {1} the {0} was in the",
}
_EXAMPLES = 2
# Facts of a prompt at least, and of a worked example.
_FACTS = {1: 8, 2: 12, 3: 16}


class Story(NamedTuple):
    facts: tuple[str, ...]
    question: str
    answer: str


def babilong(request: Request) -> list[Prompt]:
    """Prompts of bAbI's task 1, 2 or 3, as the name ends."""
    encode = request.encode
    number = int(request.name[-1])
    hay = haystacks.of(request)

    def make_prompt(rng: random.Random) -> Prompt:
        examples = [make_story(rng, number, least=4 * number) for _ in range(_EXAMPLES)]
        shown = "".join(
            f"\nExample: {' '.join(e.facts)}{e.question} {e.answer}.\n" for e in examples
        )
        story = make_story(rng, number, least=_FACTS[number])
        head = encode(_HEAD + shown)
        question = encode(story.question)
        hidden = encode.each([f" {fact}" for fact in story.facts])
        room = request.room(head, *hidden, question)
        depths = sorted(rng.random() for _ in hidden)
        start = len(request.ids(head))
        ids, spans = haystacks.hide(hidden, depths, hay(room, rng), start)
        return Prompt(
            request.ids(head, ids, question),
            story.answer,
            choices=_PLACES,
            text_spans=request.text_spans(start, start + len(ids), spans),
        )

    return request.prompts(make_prompt)


def make_story(rng: random.Random, number: int, *, least: int) -> Story:
    """At least so many facts, and a question of bAbI's task `number` that they answer."""
    at: dict[str, str] = {}
    holder: dict[str, str] = {}
    ways: dict[str, list[str]] = {}
    facts: list[str] = []
    while True:
        who = rng.choice(_PEOPLE)
        held = [thing for thing, by in holder.items() if by == who]
        free = [
            thing
            for thing in _THINGS
            if thing not in holder
            and (thing not in ways or ways[thing][-1] == at.get(who))
            and who in at
        ]
        kind = rng.choice(["go", "go", *(["take"] if free else []), *(["drop"] if held else [])])
        if number == 1 or kind == "go":
            at[who] = rng.choice([place for place in _PLACES if place != at.get(who)])
            facts.append(f"{who} {rng.choice(_GO)} the {at[who]}.")
        elif kind == "take":
            thing = rng.choice(free)
            holder[thing] = who
            facts.append(f"{who} took the {thing} there.")
        else:
            thing = rng.choice(held)
            del holder[thing]
            facts.append(f"{who} dropped the {thing} there.")
        for thing in [thing for thing, by in holder.items() if by == who]:
            way = ways.setdefault(thing, [])
            if not way or way[-1] != at[who]:
                way.append(at[who])
        if len(facts) < least:
            continue
        if number == 1:
            asked = rng.choice(sorted(at))
            return Story(tuple(facts), _QUESTION[1].format(asked), at[asked])
        known = sorted(thing for thing, way in ways.items() if len(way) >= number - 1)
        if known:
            thing = rng.choice(known)
            if number == 2:
                return Story(tuple(facts), _QUESTION[2].format(thing), ways[thing][-1])
            before, now = list(pairwise(ways[thing]))[-1]
            return Story(tuple(facts), _QUESTION[3].format(thing, now), before)


_ASKS = (
    "where somebody is",
    "where a thing is that somebody carried",
    "where a thing was before it came to a place",
)
KINDS = tuple(
    Kind(
        name=f"babilong_qa{number}",
        make=babilong,
        takes_file="may",
        asks=asks,
        source="BABILong, Kuratov et al. 2024",
    )
    for number, asks in enumerate(_ASKS, start=1)
)
