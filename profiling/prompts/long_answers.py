"""Chains whose every link has to be written down: what a long answer needs is all over the text, and in the answer.

A prompt is prefix + worked example + text with lines + question. The text is the user's or a generated one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from profiling.prompts import haystacks
from profiling.prompts.filling import room_for
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder
from profiling.prompts.words import words

_CUPS, _HIGHEST = 4, 100
_EXAMPLE_STEPS, _EXAMPLE_SEED = 3, "worked example 2"


class Chain(NamedTuple):
    """lines: hidden in the text. numbers: those of the answer, in turn. ordered: whether the lines keep their order."""

    lines: tuple[str, ...]
    question: str
    answer: str
    numbers: tuple[int, ...]
    ordered: bool


def long_answers(
    encode: Encoder, file: Path | None, length: int, samples: int, seed: int, *, form: str, steps: int = 16
) -> list[Prompt]:
    """Chains of one of FORMS with `steps` links after the first."""
    hay = haystacks.of(encode, file, f"{form} at length {length}")
    shown = FORMS[form](random.Random(_EXAMPLE_SEED), _EXAMPLE_STEPS)
    head = encode(f"{_HEAD[form]}\nExample:\n{''.join(shown.lines)}{shown.question} {shown.answer}\n\nText:\n")

    def one(rng: random.Random) -> Prompt:
        chain = FORMS[form](rng, steps)
        hidden, question = encode.each(list(chain.lines)), encode(chain.question)
        room = room_for(encode, form, length, head, *hidden, question)
        depths = [rng.random() for _ in hidden]
        ids, _ = haystacks.hide(
            hidden, sorted(depths) if chain.ordered else depths, hay(room, rng), len(encode.prefix) + len(head)
        )
        return Prompt(
            (*encode.prefix, *head, *ids, *question),
            chain.answer,
            metric="integers_in_turn",
            references=tuple(map(str, chain.numbers)),
        )

    return [one(random.Random(f"{seed} {form} {i}")) for i in range(samples)]


def _arithmetic(rng: random.Random, steps: int) -> Chain:
    """A value, and others that each take it from the one before by an addition or a subtraction; in any order."""
    named = list(islice((word for word in words(rng)), steps + 1))
    values = [rng.randrange(10, _HIGHEST)]
    lines = [f"\n{named[0]} is {values[0]}."]
    for before, name in pairwise(named):
        less = rng.randrange(1, 10)
        minus = values[-1] - less >= 0 and rng.random() < 0.5
        values.append(values[-1] + (-less if minus else less))
        lines.append(f"\n{name} is {before} {'minus' if minus else 'plus'} {less}.")
    question = f"\n\nThe values of {', '.join(named)}, in turn, are:"
    return Chain(tuple(lines), question, ", ".join(map(str, values)), tuple(values), ordered=False)


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
    return Chain(tuple(lines), question, ", ".join(map(str, places)), tuple(places), ordered=True)


FORMS: dict[str, Callable[[random.Random, int], Chain]] = {"arithmetic_chain": _arithmetic, "state_tracking": _states}
_HEAD = {
    "arithmetic_chain": "Values are set in the text below, one a line, some of them from others, in any order.",
    "state_tracking": "A ball lies under one of four cups in a row. The text below says when cups change places.",
}
