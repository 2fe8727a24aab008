"""LongProc's theory-of-mind tracking (Ye et al. 2025): what one agent sees and believes of an object after every step.

Two agents, two objects, two rooms and four containers. A prompt is prefix + padding + solved stories + story: solved
ones fill the length, and the answer has a line for every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from profiling.prompts.filling import behind_examples
from profiling.prompts.kind import LONGPROC, PARTIAL, Kind, Parameter, Prompt, Wanted

_HEAD = (
    "Follow each story. For every step say where the person is, where the object is, whether the person sees it (both "
    "are in the same room), and where the person believes it is: where it was last seen, at the start or after a step, "
    "None before that.\n\n"
)
_AGENTS = ["Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo"]
_OBJECTS = ["ball", "key", "map", "coin", "book", "lamp", "ring", "cup"]
_ROOMS = ["kitchen", "garden", "attic", "cellar", "hall", "study"]
_CONTAINERS = ["red box", "blue bag", "green drawer", "white basket", "black chest", "yellow jar"]
_OUTSIDE = "outside"
_EXAMPLE_STEPS = 3


class Story(NamedTuple):
    """steps: what happens. tracked: of each step the line that is asked for."""

    start: str
    steps: tuple[str, ...]
    asked: str
    tracked: tuple[str, ...]

    @property
    def question(self) -> str:
        told = "\n".join(f"Step {at}: {step}" for at, step in enumerate(self.steps, start=1))
        return f"{self.start}\n{told}\n{self.asked}\n"

    @property
    def answer(self) -> str:
        return "\n".join(self.tracked)


def tracking(wanted: Wanted, *, steps: int = 10, partial: int = 0) -> list[Prompt]:
    """Stories of `steps` steps; `partial` scores the share of lines before the first wrong one."""

    def solved(rng: random.Random) -> Iterator[str]:
        while True:
            story = make_story(rng, _EXAMPLE_STEPS)
            yield f"{story.question}{story.answer}\n\n"

    def one(rng: random.Random) -> Prompt:
        story = make_story(rng, steps)
        ids = behind_examples(wanted, wanted.encode(_HEAD), solved(rng), wanted.encode(story.question))
        return Prompt(ids, story.answer, metric="tom_partial" if partial else "tom")

    return wanted.prompts(one)


def make_story(rng: random.Random, steps: int) -> Story:
    """A story of so many steps, with what is to be tracked."""
    agents, objects, rooms = (rng.sample(names, 2) for names in (_AGENTS, _OBJECTS, _ROOMS))
    containers = rng.sample(_CONTAINERS, 4)
    room_of = {name: rooms[at // 2] for at, name in enumerate(containers)}
    at = {agent: rng.choice(rooms) for agent in agents}
    inside = {thing: rng.choice(containers) for thing in objects}
    holds = [f"The {thing} is in the {where} in the {room_of[where]}." for thing, where in inside.items()]
    stands = [f"The {a} and the {b} are in the {room}." for room, a, b in _pairs(rooms, containers)]
    start = " ".join([*stands, *holds, *(f"{agent} is in the {room}." for agent, room in at.items())])
    agent, thing = rng.choice(agents), rng.choice(objects)
    # Who starts beside the object has seen it.
    believed = f"the {inside[thing]}" if at[agent] == room_of[inside[thing]] else "None"
    lines, tracked = [], []
    for number in range(1, steps + 1):
        lines.append(_step(agents, objects, rooms, containers, room_of, at, inside, rng))
        where = inside[thing]
        sees = at[agent] == room_of[where]
        believed = f"the {where}" if sees else believed
        place = _OUTSIDE if at[agent] == _OUTSIDE else f"in the {at[agent]}"
        tracked.append(
            f"- Step {number}: {agent} is {place}; the {thing} is in the {where}; "
            f"{agent} sees it: {'yes' if sees else 'no'}; {agent} believes: {believed}."
        )
    return Story(start, tuple(lines), f"Track {agent} and the {thing}.", tuple(tracked))


def _step(
    agents: list[str],
    objects: list[str],
    rooms: list[str],
    containers: list[str],
    room_of: dict[str, str],
    at: dict[str, str],
    inside: dict[str, str],
    rng: random.Random,
) -> str:
    """One thing that happens, in words; `at` and `inside` are changed."""
    agent, room = rng.choice(agents), rng.choice(rooms)
    here = at[agent]
    if here == _OUTSIDE:
        at[agent] = room
        return f"{agent} enters the {room}."
    near = [thing for thing in objects if room_of[inside[thing]] == here]
    kind = rng.choice(("go", "leave", "put", "carry") if near else ("go", "leave"))
    other = next(each for each in rooms if each != here)
    if kind == "leave":
        at[agent] = _OUTSIDE
        return f"{agent} leaves the {here}."
    if kind == "go":
        at[agent] = other
        return f"{agent} goes from the {here} to the {other}."
    thing, goal = rng.choice(near), here if kind == "put" else other
    at[agent] = goal
    inside[thing] = rng.choice([name for name in containers if room_of[name] == goal and name != inside[thing]])
    way = f"puts the {thing} into" if kind == "put" else f"carries the {thing} to the {goal} and puts it into"
    return f"{agent} {way} the {inside[thing]}."


def _pairs(rooms: list[str], containers: list[str]) -> list[tuple[str, str, str]]:
    return [(room, containers[2 * at], containers[2 * at + 1]) for at, room in enumerate(rooms)]


KINDS = (
    Kind(
        name="longproc_tom",
        make=tracking,
        parameters=(Parameter("steps", int, "steps of the story (10)", 1, 10_000), PARTIAL),
        asks="where a person and an object are after each step, and what the person believes",
        scored="every line is right, but for case, punctuation and small words",
        source=LONGPROC,
    ),
)
