"""What the readers of files with a record a line share, and the tasks whose records are the user's own.

The suites keep a prompt's start and end where it is longer than a model takes, since both may say what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.kind import Kind, Parameter, Prompt, Wanted
from profiling.prompts.texts import read_text
from profiling.prompts.tokens import Ids

TASK = Parameter("task", str, "which of the suite's tasks it is, where the file does not say")
_FIELDS = ("prompt", "text", "input")
# JSON can say what no text can hold, and tokenizers fail on it.
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Asked:
    """One record as a prompt's text with what its answer is compared with, and how."""

    text: str
    references: tuple[str, ...]
    metric: str = "begins"
    new_tokens: int | None = None
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


def json_object(line: str, place: str) -> dict[str, Any]:
    """One line of a JSON lines file; HeadwiseError, which names the place, where it is cut off or no object."""
    record = json_value(line, place)
    if not isinstance(record, dict):
        raise HeadwiseError(f"{place}: not a JSON object: {shorten(record)}")
    return record


def json_value(text: str, place: str) -> Any:
    """What a text of JSON says; HeadwiseError, which names the place, where it says nothing."""
    try:
        value = json.loads(text)
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise HeadwiseError(f"{place}: half of a surrogate pair, which is no character") from error
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise HeadwiseError(f"{place}: not JSON: {error.msg.lower()} at {where}") from error
    except RecursionError as error:
        raise HeadwiseError(f"{place}: not usable JSON: nested too deeply") from error


def cut_middle(ids: Ids, room: int) -> Ids:
    """The first half and the last half of `room` tokens; all where there are no more."""
    if len(ids) <= room:
        return ids
    half = room // 2
    return ids[:half] + ids[len(ids) - (room - half) :]


def prompts_of(
    wanted: Wanted, ask: Callable[[Record], Asked], cut: Callable[[Ids, int], Ids] = cut_middle
) -> list[Prompt]:
    """Records in random order as prompts; of longer ones something is cut out.

    Shorter ones are passed over, or taken as they are where these are wanted, too. All lines are read before any is
    used: a damaged one is found whatever the seed.
    """
    asked = [ask(record) for record in records(wanted.file)]
    wanted.rng().shuffle(asked)
    before = len(wanted.ids())
    room = wanted.length - before
    made: list[Prompt] = []
    longest = 0
    for one in asked:
        ids = wanted.encode(one.text)
        longest = max(longest, len(ids) + before)
        if len(ids) >= room > 0 or (wanted.shorter and room > 0 and ids):
            made.append(
                Prompt(
                    wanted.ids(cut(ids, room)),
                    one.references[0] if one.references else None,
                    metric=one.metric,
                    references=one.references,
                    choices=one.choices,
                    new_tokens=one.new_tokens,
                )
            )
            if len(made) == wanted.samples:
                return made
    least = "" if wanted.shorter else f" of at least {wanted.length} tokens"
    raise HeadwiseError(
        f"{wanted.file.name} has {len(made)} prompts{least}, {wanted.samples} are needed; "
        f"the longest of its {len(asked)} has {longest} tokens"
    )


def name_in(suite: str, known: Iterable[str], given: str, place: str) -> str:
    """The task of a suite that a file or parameter names; HeadwiseError where the suite has none of that name."""
    names = list(known)
    if given in names:
        return given
    raise HeadwiseError(
        f"{place}: {shorten(given)} is no task of {suite}; write {suite}@task=NAME:FILE with one of {', '.join(names)}"
    )


def jsonl(wanted: Wanted) -> list[Prompt]:
    """Prompts of a file with one JSON object a line; what is too long loses its start."""
    return prompts_of(replace(wanted, shorter=False), _line, lambda ids, room: ids[len(ids) - room :])


def _line(record: Record) -> Asked:
    named = [field for field in _FIELDS if field in record]
    if len(named) != 1:
        raise HeadwiseError(f"{record.place}: give one of {', '.join(_FIELDS)}, found {', '.join(named) or 'none'}")
    return Asked(record.text(named[0]), (record.text("answer"),) if "answer" in record else ())


KINDS = (Kind(name="jsonl", make=jsonl, takes_file="must", asks="what your prompts ask", source="your file"),)
