"""BABILong (Kuratov et al. 2024): facts in the manner of bAbI (Weston et al. 2015), in their order, all over a text.

A prompt is prefix + worked examples + text with facts + question. The text is the user's or a generated one. 1 asks
where somebody is, 2 where a thing is that somebody carried, 3 where it was before it came to a place.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from profiling.prompts import haystacks
from profiling.prompts.filling import room_for
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder

_PEOPLE = ("Mary", "John", "Sandra", "Daniel")
_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_THINGS = ("football", "apple", "milk")
_GO = ("moved to", "went to", "travelled to", "journeyed to")
_HEAD = (
    "Facts about people and things are hidden in the text below. Where there are several, the last one holds. "
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


class Told(NamedTuple):
    facts: tuple[str, ...]
    question: str
    answer: str


def babilong(encode: Encoder, file: Path | None, length: int, samples: int, seed: int, *, number: int) -> list[Prompt]:
    """Prompts of bAbI's task 1, 2 or 3."""
    task = f"babilong_qa{number}"
    hay = haystacks.of(encode, file, f"{task} at length {length}")

    def one(rng: random.Random) -> Prompt:
        examples = [told(rng, number, least=4 * number) for _ in range(_EXAMPLES)]
        shown = "".join(f"\nExample: {' '.join(e.facts)}{e.question} {e.answer}.\n" for e in examples)
        story = told(rng, number, least=_FACTS[number])
        head, question = encode.prefix + encode(_HEAD + shown), encode(story.question)
        hidden = encode.each([f" {fact}" for fact in story.facts])
        room = room_for(encode, task, length, head[len(encode.prefix) :], *hidden, question)
        depths = sorted(rng.random() for _ in hidden)
        ids, _ = haystacks.hide(hidden, depths, hay(room, rng), len(head))
        return Prompt((*head, *ids, *question), story.answer, choices=_PLACES)

    return [one(random.Random(f"{seed} {task} {i}")) for i in range(samples)]


def told(rng: random.Random, number: int, *, least: int) -> Told:
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
            if thing not in holder and (thing not in ways or ways[thing][-1] == at.get(who)) and who in at
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
            return Told(tuple(facts), _QUESTION[1].format(asked), at[asked])
        known = sorted(thing for thing, way in ways.items() if len(way) >= number - 1)
        if known:
            thing = rng.choice(known)
            if number == 2:
                return Told(tuple(facts), _QUESTION[2].format(thing), ways[thing][-1])
            before, now = list(pairwise(ways[thing]))[-1]
            return Told(tuple(facts), _QUESTION[3].format(thing, now), before)
