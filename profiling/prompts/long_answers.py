"""Chains whose every link has to be written down: what a long answer needs is all over the text, and in the answer.

A prompt is prefix + worked example + text with lines + question. The text is the user's or a generated one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice, pairwise
from typing import NamedTuple

from profiling.prompts import haystacks
from profiling.prompts.kind import Kind, Parameter, Prompt, Wanted
from profiling.prompts.words import words

_CUPS, _HIGHEST = 4, 100
_EXAMPLE_STEPS, _EXAMPLE_SEED = 3, "worked example 2"


class Chain(NamedTuple):
    """lines: hidden in the text. numbers: those of the answer, in turn. ordered: whether the lines keep their order."""

    lines: tuple[str, ...]
    question: str
    numbers: tuple[int, ...]
    ordered: bool

    @property
    def answer(self) -> str:
        return ", ".join(map(str, self.numbers))


def _made(wanted: Wanted, form: Callable[[random.Random, int], Chain], told: str, steps: int) -> list[Prompt]:
    """Chains of a form with `steps` links after the first."""
    encode, hay = wanted.encode, haystacks.of(wanted)
    shown = form(random.Random(_EXAMPLE_SEED), _EXAMPLE_STEPS)
    head = encode(f"{told}\nExample:\n{''.join(shown.lines)}{shown.question} {shown.answer}\n\nText:\n")

    def one(rng: random.Random) -> Prompt:
        chain = form(rng, steps)
        hidden, question = encode.each(list(chain.lines)), encode(chain.question)
        room = wanted.room(head, *hidden, question)
        depths = [rng.random() for _ in hidden]
        ids, _ = haystacks.hide(hidden, sorted(depths) if chain.ordered else depths, hay(room, rng), 0)
        return Prompt(
            wanted.ids(head, ids, question),
            chain.answer,
            metric="integers_in_turn",
            references=tuple(map(str, chain.numbers)),
        )

    return wanted.prompts(one)


def arithmetic_chain(wanted: Wanted, *, steps: int = 16) -> list[Prompt]:
    """Values that are sums and differences of one another."""
    told = "Values are set in the text below, one a line, some of them from others, in any order."
    return _made(wanted, _arithmetic, told, steps)


def state_tracking(wanted: Wanted, *, steps: int = 16) -> list[Prompt]:
    """A ball under one of four cups that change places."""
    told = "A ball lies under one of four cups in a row. The text below says when cups change places."
    return _made(wanted, _states, told, steps)


def _arithmetic(rng: random.Random, steps: int) -> Chain:
    """A value, and others that each take it from the one before by an addition or a subtraction; in any order."""
    named = list(islice(words(rng), steps + 1))
    values = [rng.randrange(10, _HIGHEST)]
    lines = [f"\n{named[0]} is {values[0]}."]
    for before, name in pairwise(named):
        less = rng.randrange(1, 10)
        minus = values[-1] - less >= 0 and rng.random() < 0.5
        values.append(values[-1] + (-less if minus else less))
        lines.append(f"\n{name} is {before} {'minus' if minus else 'plus'} {less}.")
    return Chain(tuple(lines), f"\n\nThe values of {', '.join(named)}, in turn, are:", tuple(values), ordered=False)


def _states(rng: random.Random, steps: int) -> Chain:
    """A ball under one of four cups, and cups that change places."""
    under = rng.randrange(1, _CUPS + 1)
    places, lines = [under], [f"\nAt first the ball is under cup {under}."]
    for _ in range(steps):
        a, b = rng.sample(range(1, _CUPS + 1), 2)
        under = {a: b, b: a}.get(under, under)
        places.append(under)
        lines.append(f"\nCups {a} and {b} change places, with what is under them.")
    question = "\n\nThe cups that the ball was under, at first and after each change of places, are:"
    return Chain(tuple(lines), question, tuple(places), ordered=True)


def _kind(make: Callable[..., list[Prompt]], asks: str, source: str) -> Kind:
    return Kind(
        name=make.__name__,
        make=make,
        takes_file="may",
        parameters=(Parameter("steps", int, "how many links follow the first (16)", 1, 10_000),),
        asks=asks,
        scored="the share of the values in turn before the first wrong one",
        source=source,
    )


KINDS = (
    _kind(
        arithmetic_chain, "values that are sums and differences of one another, all of them", "variable tracking, RULER"
    ),
    _kind(
        state_tracking,
        "which cup a ball is under after each of many swaps",
        "state tracking, Kim & Schuster 2023",
    ),
)
