"""What the readers of published suites share: records out of their files, and prompts that are cut in the middle.

The suites keep a prompt's start and end where it is longer than a model takes, since both may say what to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.prompt import Prompt
from profiling.prompts.texts import json_object, read_text
from profiling.prompts.tokens import Encoder, Ids


@dataclass(frozen=True)
class Asked:
    """One record of a suite as a prompt's text with what its answer is compared with, and how."""

    text: str
    references: tuple[str, ...]
    metric: str
    new_tokens: int
    choices: tuple[str, ...] = ()


class Record:
    """The fields of one line, each checked when it is asked for; `place` names file and line."""

    def __init__(self, fields: dict[str, Any], place: str) -> None:
        self._fields = fields
        self.place = place

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def text(self, name: str) -> str:
        """A field that must be a string."""
        value = self._field(name)
        if not isinstance(value, str):
            raise HeadwiseError(f"{self.place}: {name} must be a string, got {shorten(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A field that must be a string, a number, or several of these; at least one."""
        value = self._field(name)
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
            raise HeadwiseError(f"{self.place}: {name} must be strings or numbers, got {shorten(value)}")
        return tuple(map(str, items))

    def numbers(self, name: str) -> tuple[str, ...]:
        """A field of one or more numbers, which may be written as strings."""
        found = self.texts(name)
        for text in found:
            try:
                float(text)
            except ValueError:
                raise HeadwiseError(f"{self.place}: {name} must be numbers, got {shorten(text)}") from None
        return found

    def _field(self, name: str) -> Any:
        if name not in self._fields:
            raise HeadwiseError(f"{self.place}: no field {name}; it has {', '.join(map(str, self._fields)) or 'none'}")
        return self._fields[name]


def records(file: Path) -> Iterator[Record]:
    """The lines of a file of JSON lines that are not blank."""
    found = False
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if line.strip():
            found = True
            place = f"{file.name}, line {number}"
            yield Record(json_object(line, place), place)
    if not found:
        raise HeadwiseError(f"{file.name} is empty")


def prompts_of(
    encode: Encoder,
    file: Path,
    length: int,
    samples: int,
    seed: int,
    *,
    suite: str,
    ask: Callable[[Record], Asked],
    shorter: bool,
) -> list[Prompt]:
    """Records in random order as prompts of `length` tokens, the middle cut out of longer ones.

    Shorter ones are passed over, or taken as they are where `shorter` says so. All lines are read before any is used:
    a damaged one is found whatever the seed.
    """
    asked = [ask(record) for record in records(file)]
    random.Random(f"{seed} {suite}").shuffle(asked)
    room = length - len(encode.prefix)
    made: list[Prompt] = []
    longest = 0
    for one in asked:
        ids = encode(one.text)
        longest = max(longest, len(ids) + len(encode.prefix))
        if len(ids) >= room > 0 or (shorter and room > 0 and ids):
            made.append(
                Prompt(
                    (*encode.prefix, *cut_middle(ids, room)),
                    one.references[0],
                    metric=one.metric,
                    references=one.references,
                    choices=one.choices,
                    new_tokens=one.new_tokens,
                )
            )
            if len(made) == samples:
                return made
    least = "" if shorter else f" of at least {length} tokens"
    raise HeadwiseError(
        f"{file.name} has {len(made)} prompts{least}, {samples} are needed; "
        f"the longest of its {len(asked)} has {longest} tokens"
    )


def cut_middle(ids: Ids, room: int) -> Ids:
    """The first half and the last half of `room` tokens; all where there are no more."""
    if len(ids) <= room:
        return ids
    half = room // 2
    return ids[:half] + ids[len(ids) - (room - half) :]


def name_in(suite: str, known: Iterable[str], given: str, place: str) -> str:
    """The task of a suite that a file or parameter names; HeadwiseError where the suite has none of that name."""
    names = list(known)
    if given in names:
        return given
    raise HeadwiseError(
        f"{place}: {shorten(given)} is no task of {suite}; write {suite}@task=NAME:FILE with one of {', '.join(names)}"
    )
