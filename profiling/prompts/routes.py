"""LongProc's path traversal (Ye et al. 2025): cities with one way out each, and the whole route between two of them.

A prompt is prefix + padding + worked example + lines + question. As many cities as fit stand in any order; the route
stays as long as it was asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, pairwise

from profiling.prompts.filling import laid_out, whole_items
from profiling.prompts.kind import LONGPROC, PARTIAL, Kind, Parameter, Prompt, Wanted
from profiling.prompts.words import compounds

_HEAD = "Each city below has one connection to another city. Give the route between two cities, one step a line.\n\n"
_LINE = "{0}: {2} to {1}.\n"
_STEP = "From {0}, take a {2} to {1}."
_QUESTION = "\nThe route from {} to {}:\n<Route>"
_END = "</Route>"
_BY = ("bus", "train", "plane", "ferry")
_WRONG = 3
_EXAMPLE = (("Ardun", "Belzo", "train"), ("Belzo", "Corvin", "bus"), ("Corvin", "Ardun", "ferry"))


def paths(wanted: Wanted, *, steps: int = 24, partial: int = 0) -> list[Prompt]:
    """Routes of `steps` steps; `partial` scores the share of them before the first wrong one."""
    shown = "".join(_LINE.format(*step) for step in _EXAMPLE)
    worked = f"{_QUESTION.format('Ardun', 'Corvin')} {_route(list(_EXAMPLE[:2]))}\n\n"
    encode = wanted.encode
    head = encode(f"{_HEAD}{shown}{worked}")

    def one(rng: random.Random) -> Prompt:
        source = (name.capitalize() for name in compounds(random.Random(rng.random())))
        cities = list(islice(source, steps + 1))
        route = [(a, b, rng.choice(_BY)) for a, b in pairwise(cities)]
        needed = encode.each([_LINE.format(*step) for step in route])
        question = encode(_QUESTION.format(cities[0], cities[-1]))
        room = wanted.room(head, *needed, question)

        def others() -> Iterator[str]:
            # The route's end has a way out, too.
            yield _LINE.format(cities[-1], rng.choice(cities[:-1]), rng.choice(_BY))
            for city in source:
                yield _LINE.format(city, rng.choice(cities), rng.choice(_BY))
                cities.append(city)

        lines = [*needed, *whole_items(encode, others(), room)]
        rng.shuffle(lines)
        ids = laid_out(wanted, head, *lines, question)
        # One step by another way is wrong.
        wrong = []
        for at in rng.sample(range(steps), min(_WRONG, steps)):
            a, b, by = route[at]
            other = rng.choice([way for way in _BY if way != by])
            wrong.append(_route([*route[:at], (a, b, other), *route[at + 1 :]]))
        right = _route(route)
        return Prompt(ids, right, metric="route_partial" if partial else "route", choices=(right, *wrong))

    return wanted.prompts(one)


def _route(steps: list[tuple[str, str, str]]) -> str:
    return "\n".join([*(_STEP.format(*step) for step in steps), _END])


KINDS = (
    Kind(
        name="longproc_path",
        make=paths,
        parameters=(Parameter("steps", int, "steps of the route (24)", 1, 10_000), PARTIAL),
        asks="the route between two of many cities, step by step",
        scored="every step is right",
        source=LONGPROC,
    ),
)
