"""The verbs of `python -m artifacts`, one module each.

A verb's module has `Config`, a frozen dataclass whose fields are the destinations of its arguments; SHORT, what it does
in a line; EXAMPLES, the end of its help; `add_arguments(parser)`; and `run(config)`, which gives what to print and the
exit status: 0 fine, 1 findings or differences. Bad input is an error, with status 2.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FOUND = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a verb prints on stdout, and its exit status."""

    text: str
    status: int = 0


class Verb(Protocol):
    """What the module of a verb holds."""

    Config: Any
    SHORT: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Give the parser the verb's arguments, with the fields of Config as destinations."""

    def run(self, config: Any) -> Outcome:
        """Do it. Raises HeadwiseError where the input is bad."""


def add_file(parser: argparse.ArgumentParser, name: str = "file", metavar: str = "FILE") -> None:
    """The argument for an artifact's YAML file."""
    parser.add_argument(name, metavar=metavar, type=Path, help="the artifact's YAML file, such as cfg.yaml")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option for programs."""
    parser.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object, for programs")


def add_out(parser: argparse.ArgumentParser, what: str) -> None:
    """The option that says where to write."""
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help=what)
