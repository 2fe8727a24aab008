"""The verbs of `headwise`, one module each.

A verb's module has `Config`, a frozen dataclass that declares the verb's arguments; SHORT, what it
does in a line; EXAMPLES, the end of its help; and `run(config)`, which gives what to print and the
exit status: 0 fine, 3 differences or losses. Bad input is an error, with status 2."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Protocol

from artifacts.cli.arguments import JSON, STDOUT, json_file
from artifacts.cli.options import arg
from artifacts.errors import one_line
from artifacts.files import atomic_write


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Text that a verb prints on stdout, and its exit status."""

    text: str
    status: int = 0


class Verb(Protocol):
    """Members that a verb's module has."""

    Config: Any
    SHORT: str
    EXAMPLES: str

    def run(self, config: Any) -> Outcome:
        """Run the verb; HeadwiseError where the input is bad."""


def answer(as_json: Path | None, facts: Any, lines: Iterable[str], *, status: int = 0) -> Outcome:
    """Lines for people; with --json the facts as one JSON object in their place, or in a file."""
    return as_asked(
        as_json, json.dumps(facts), "".join(f"{one_line(line)}\n" for line in lines), status=status
    )


def as_asked(as_json: Path | None, made: str, text: str, *, status: int = 0) -> Outcome:
    """Outcome of text, or with --json of the JSON `made`."""
    if as_json == STDOUT:
        return Outcome(text=f"{made}\n", status=status)
    if as_json is not None:
        atomic_write(as_json, f"{made}\n".encode())
    return Outcome(text=text, status=status)


def file_arg(
    metavar: str = "FILE", help: str = "the artifact's YAML file, such as cfg.yaml"
) -> Any:
    """The artifact's YAML file, positional."""
    return arg(metavar=metavar, type=Path, help=help)


def out_arg(help: str, default: Any = MISSING) -> Any:
    """--out, the file to write."""
    return arg("--out", metavar="FILE", type=Path, default=default, help=help)


def json_flag() -> Any:
    """--json, output for programs."""
    return arg(
        "--json", metavar="FILE", nargs="?", type=json_file, const=STDOUT, default=None, help=JSON
    )
