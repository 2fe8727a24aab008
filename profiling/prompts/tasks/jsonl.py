"""Prompts of the user's own, out of a file of JSON lines."""

from __future__ import annotations

import json
import re
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.kind import Prompt, Request, task
from profiling.prompts.text_files import read_text

_FIELDS = ("prompt", "text", "input")
# JSON can encode a lone surrogate, which is not valid text and makes tokenizers fail.
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


@task(
    "jsonl",
    takes_file="must",
    asks="the questions of your prompts",
    source="your file",
)
def jsonl(request: Request) -> list[Prompt]:
    """Prompts of a file with one JSON object a line, in random order.

    A prompt that is too long loses its start; one that is too short is skipped. All lines are read
    before any is used, so a damaged one is reported for any seed.
    """
    lines = list(enumerate(_lines(request)))
    request.rng().shuffle(lines)
    before = len(request.encode.prefix)
    room = request.length - before
    prompts: list[Prompt] = []
    longest = 0
    for number, (text, answer) in lines:
        ids = request.encode(text)
        longest = max(longest, len(ids) + before)
        if len(ids) >= room > 0:
            references = () if answer is None else (answer,)
            own, spans = request.assemble((), [ids])
            prompts.append(
                Prompt(
                    own,
                    answer,
                    references=references,
                    text_spans=tuple(spans),
                    cell=(number, number + 1),
                )
            )
            if len(prompts) == request.samples:
                break
    if not prompts:
        raise HeadwiseError(
            f"{request.file.name} has no prompt of at least {request.length} tokens; "
            f"the longest of its {len(lines)} has {longest} tokens"
        )
    return prompts


def _lines(request: Request) -> list[tuple[str, str | None]]:
    """The text and the answer of each line that is not blank."""
    lines = []
    for number, line in enumerate(read_text(request.file).split("\n"), start=1):
        if line.strip():
            lines.append(_line(line, f"{request.file.name}, line {number}"))
    if not lines:
        raise HeadwiseError(f"{request.file.name} is empty")
    return lines


def _line(line: str, place: str) -> tuple[str, str | None]:
    record = _record(line, place)
    named = [field for field in _FIELDS if record.get(field) is not None]
    if len(named) != 1:
        raise HeadwiseError(
            f"{place}: give one of {', '.join(_FIELDS)}, found {', '.join(named) or 'none'}"
        )
    answer = None
    if record.get("answer") is not None:
        answer = _text(record, "answer", place)
    elif record.get("answers") is not None:
        raise HeadwiseError(
            f"{place}: answers is not read, got {shorten(record['answers'])}: give answer, a string"
        )
    return _text(record, named[0], place), answer


def _text(record: dict[str, Any], name: str, place: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise HeadwiseError(f"{place}: {name} must be a string, got {shorten(value)}")
    if not value.strip():
        raise HeadwiseError(f"{place}: {name} must have text, got {shorten(value)}")
    return value


class _DuplicateKeyError(Exception):
    """A key that appears twice, of which json would take the last."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs; _DuplicateKeyError if two have the same key."""
    record: dict[str, Any] = {}
    for name, value in pairs:
        if name in record:
            raise _DuplicateKeyError(shorten(name))
        record[name] = value
    return record


def _record(line: str, place: str) -> dict[str, Any]:
    """Parse a JSON object; HeadwiseError names the line that is cut off or holds none."""
    try:
        record = json.loads(line, object_pairs_hook=_unique)
        if _HALF_PAIR.search(line):
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise HeadwiseError(f"{place}: half of a surrogate pair, which is no character") from error
    except json.JSONDecodeError as error:
        raise HeadwiseError(
            f"{place}: not JSON: {error.msg.lower()} at column {error.colno}"
        ) from error
    except _DuplicateKeyError as error:
        raise HeadwiseError(f"{place}: the key {error} appears twice: remove one") from None
    except RecursionError as error:
        raise HeadwiseError(f"{place}: not usable JSON: nested too deeply") from error
    if not isinstance(record, dict):
        raise HeadwiseError(f"{place}: not a JSON object: {shorten(record)}")
    return record
