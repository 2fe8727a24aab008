"""LongProc's countdown (Ye et al. 2025): four numbers, a target, and the whole depth-first search for it as the answer.

A prompt is prefix + padding + solved puzzles + puzzle: solved ones fill the length, and the answer is long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from profiling.prompts.filling import behind_examples
from profiling.prompts.kind import LONGPROC, PARTIAL, Kind, Parameter, Prompt, Wanted

_HEAD = (
    "Reach the target from four numbers by +, -, * and /, each number used once. Search depth first: take the pairs in "
    "the order of the list, the larger number first, and try the four operations in turn; the result goes in front of "
    "the numbers that are left. Results that are no whole numbers, or not below 2000, are passed over.\n\n"
)
_PUZZLE = "Numbers: [{numbers}]. Target: {target}.\n# Search Procedure\n"
_LIMIT = 2000
_TARGETS = range(10, 51)
_NUMBERS = range(1, 50)
# Trace lines of a solved puzzle at most.
_EXAMPLE = 8


class Puzzle(NamedTuple):
    """lines: of the search, in turn. equations: the three that reach the target."""

    numbers: tuple[int, ...]
    target: int
    lines: tuple[str, ...]
    equations: tuple[str, ...]

    @property
    def question(self) -> str:
        return _PUZZLE.format(numbers=_joined(self.numbers), target=self.target)

    @property
    def answer(self) -> str:
        return "\n".join((*self.lines, "<Solution>", *self.equations, "</Solution>"))


def countdown(wanted: Wanted, *, lines: int = 20, partial: int = 0) -> list[Prompt]:
    """Puzzles whose search takes at most `lines` lines; `partial` scores the share of them before the first mistake."""

    def solved(rng: random.Random) -> Iterator[str]:
        while True:
            puzzle = made(rng, _EXAMPLE)
            yield f"{puzzle.question}{puzzle.answer}\n\n"

    def one(rng: random.Random) -> Prompt:
        puzzle = made(rng, lines)
        ids = behind_examples(wanted, wanted.encode(_HEAD), solved(rng), wanted.encode(puzzle.question))
        return Prompt(ids, puzzle.answer, metric="countdown_partial" if partial else "countdown")

    return wanted.prompts(one)


def made(rng: random.Random, lines: int) -> Puzzle:
    """A puzzle whose target is first reached within `lines` lines of its search."""
    while True:
        numbers = tuple(rng.choices(_NUMBERS, k=4))
        trace: list[str] = []
        ends: dict[int, tuple[int, tuple[str, ...]]] = {}
        for line, value, equations in _search(numbers, 0, ()):
            trace.append(line)
            if value is not None and value in _TARGETS and value not in ends:
                ends[value] = len(trace), equations
            if len(trace) == lines:
                break
        if ends:
            target = rng.choice(list(ends))
            count, equations = ends[target]
            return Puzzle(numbers, target, tuple(trace[:count]), equations)


def _search(
    numbers: Sequence[int], depth: int, done: tuple[str, ...]
) -> Iterator[tuple[str, int | None, tuple[str, ...]]]:
    """Lines of the search, with the value that is left and the way to it where a line ends in one number."""
    indent = "  " * depth
    for i, j in combinations(range(len(numbers)), 2):
        a, b = max(numbers[i], numbers[j]), min(numbers[i], numbers[j])
        rest = [number for at, number in enumerate(numbers) if at not in (i, j)]
        yield f"{indent}Pick two numbers {a} and {b}, left [{_joined(rest)}].", None, done
        for sign, value in (("+", a + b), ("-", a - b), ("*", a * b), ("/", a // b if b and a % b == 0 else _LIMIT)):
            if value < _LIMIT:
                equation = f"{a} {sign} {b} = {value}"
                yield f"{indent}|- Try {equation}.", None if rest else value, (*done, equation)
                if rest:
                    yield from _search([value, *rest], depth + 1, (*done, equation))


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


KINDS = (
    Kind(
        name="longproc_countdown",
        make=countdown,
        parameters=(Parameter("lines", int, "lines of the search at most (20)", 4, 10_000), PARTIAL),
        asks="the search for a target from four numbers, written down, and its solution",
        scored="the solution's equations are true and reach the target",
        source=LONGPROC,
    ),
)
