"""Prompts out of texts: windows of the user's or of Python's own reference, lines of JSON."""

from __future__ import annotations

import ast
import functools
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder, Ids

# Folders of the standard library whose docstrings are prose, and how many characters make one worth reading.
_LIBRARY: tuple[str, ...] = (
    ".",
    "asyncio",
    "collections",
    "concurrent/futures",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
)
_LIBRARY += ("multiprocessing", "unittest", "urllib", "xml/dom", "xml/sax")
_LEAST = 80
_FIELDS = ("prompt", "text", "input")
# JSON can say what no text can hold, and tokenizers fail on it.
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def windows(encode: Encoder, file: Path | None, length: int, samples: int, seed: int) -> list[Prompt]:
    """Stretches of a text at random places, apart from one another where the text is long enough for that."""
    assert file is not None
    return _stretches(encode, read_ids(encode, file), file.name, length, samples, seed)


def _stretches(encode: Encoder, ids: Ids, name: str, length: int, samples: int, seed: int) -> list[Prompt]:
    room = length - len(encode.prefix)
    if room < 1:
        raise HeadwiseError(f"length {length} is too small: the tokenizer's own start fills it")
    starts = len(ids) - room + 1
    if starts < samples:
        raise HeadwiseError(
            f"{name} is too short: it has {len(ids)} tokens, {samples} x {length} tokens need "
            f"at least {room + samples - 1}"
        )
    rng = random.Random(f"{seed} text")
    # A random order of disjoint windows, all shifted by the same amount; of any windows where there are too few.
    shift = rng.randint(0, len(ids) % room)
    apart = list(range(shift, starts, room))
    chosen = rng.sample(apart if len(apart) >= samples else range(starts), samples)
    return [Prompt((*encode.prefix, *ids[start : start + room]), None) for start in chosen]


def prose(encode: Encoder, file: Path | None, length: int, samples: int, seed: int) -> list[Prompt]:
    """Stretches of the documentation that every Python carries: English of a technical kind.

    First the language reference of help(), then the docstrings of the standard library. Other Python versions have
    other words in places.
    """
    assert file is None
    return _stretches(encode, encode.whole(pythons_own), "Python's own documentation", length, samples, seed)


@functools.cache
def pythons_own() -> str:
    """The topics of help() by name, then the docstrings of the standard library's modules by name, in their order."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for part in _LIBRARY for file in (library / part).glob("*.py"))
    return "\n\n".join([*(topics[name] for name in sorted(topics)), *chain.from_iterable(map(_docstrings, files))])


def _docstrings(file: Path) -> list[str]:
    """Those of a module, its classes and functions that are more than a line or two."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in found if len(text) >= _LEAST]


def lines(encode: Encoder, file: Path | None, length: int, samples: int, seed: int) -> list[Prompt]:
    """Prompts of a file with one JSON object a line, in random order; what is too long loses its start."""
    assert file is not None
    records = list(_records(file))
    random.Random(f"{seed} jsonl").shuffle(records)
    room = length - len(encode.prefix)
    made: list[Prompt] = []
    longest = 0
    for text, answer in records:
        ids = encode(text)
        longest = max(longest, len(ids))
        if len(ids) >= room > 0:
            made.append(Prompt((*encode.prefix, *ids[len(ids) - room :]), answer))
            if len(made) == samples:
                return made
    raise HeadwiseError(
        f"{file.name} has {len(made)} prompts of at least {length} tokens, {samples} are needed; "
        f"the longest of its {len(records)} has {longest + len(encode.prefix)}"
    )


def read_ids(encode: Encoder, file: Path) -> Ids:
    """The ids of a whole text file."""
    text = read_text(file)
    ids = encode(text)
    if not text.strip() or not ids:
        raise HeadwiseError(f"{file.name} is empty")
    return ids


def read_text(file: Path) -> str:
    """A file of UTF-8 text; HeadwiseError where it is none."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HeadwiseError(f"{file.name} is not UTF-8 text: byte {error.start} does not belong there") from error
    except OSError as error:
        raise HeadwiseError(f"cannot read {file.name}: {(error.strerror or str(error)).lower()}") from error


def _records(file: Path) -> Iterator[tuple[str, str | None]]:
    found = False
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if line.strip():
            found = True
            yield _record(line, f"{file.name}, line {number}")
    if not found:
        raise HeadwiseError(f"{file.name} is empty")


def _record(line: str, place: str) -> tuple[str, str | None]:
    record = json_object(line, place)
    named = [field for field in _FIELDS if field in record]
    if len(named) != 1:
        raise HeadwiseError(f"{place}: give one of {', '.join(_FIELDS)}, found {', '.join(named) or 'none'}")
    text, answer = record[named[0]], record.get("answer")
    for name, value in ((named[0], text), ("answer", answer)):
        if not isinstance(value, str) and not (name == "answer" and value is None):
            raise HeadwiseError(f"{place}: {name} must be a string, got {shorten(value)}")
    return text, answer


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
