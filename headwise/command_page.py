"""docs/commands.md: every command and its arguments, from the parsers themselves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

from artifacts.cli import arguments
from artifacts.cli.command import ADVANCED, ArgumentParser, is_set_off, run_command
from artifacts.files import atomic_write
from headwise.__main__ import GROUPS, SHARED

_INTRO = """\
# Commands

This page is made from the parsers.

`-h`, `-q` (no progress, no warnings), `-v` (what is logged, too, and the traceback of an error)
and `--version` go with every command. The exit status is 0 where all is good, 1 for a bug of ours
(with a traceback), 2 for a mistake in what was typed or read (one line) and 3 for a finding: a
failed gate, something odd, a difference. After Ctrl-C it is 130. `--json` prints one JSON object
in place of the text; `--json FILE.json` prints the text and writes the file.
"""
# What the page says once, for all.
_COMMON = frozenset(("help", "quiet", "verbose", "version"))


def page() -> str:
    """The page as Markdown."""
    parts = [_INTRO]
    for group, verbs in GROUPS.items():
        rows = [
            f"| [`headwise {verb}`](#headwise-{verb}) | {says} |"
            for verb, (_, says) in verbs.items()
        ]
        parts.append("\n".join((f"**{group}**", "", "| | |", "|---|---|", *rows, "")))
    for verbs in GROUPS.values():
        parts += [_section(verb, _parser(verb, module)) for verb, (module, _) in verbs.items()]
    return "\n".join(parts)


def _parser(verb: str, module: str) -> ArgumentParser:
    parser: ArgumentParser
    if module not in SHARED:
        parser = import_module(module).parser()
        return parser
    subparsers = next(
        each for each in import_module(f"{module}.__main__").parser()._actions if each.choices
    )
    assert isinstance(subparsers, argparse._SubParsersAction)
    parser = subparsers.choices[verb]
    return parser


def _section(verb: str, parser: ArgumentParser) -> str:
    lines = [f"## headwise {verb}", ""]
    lines += _text(parser.description or "")
    few = parser.heading(ADVANCED)._group_actions
    shown = [action for action in parser._actions if action.dest not in _COMMON and _shown(action)]
    shown.sort(key=lambda action: action in few)
    rows = [_row(parser, action) for action in shown]
    lines += ["| argument | |", "|---|---|", *rows, ""] if rows else []
    lines += _text(parser.epilog or "")
    return "\n".join(lines)


def _shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not set(action.option_strings) & {
        "-h",
        "-q",
        "-v",
        "--version",
    }


def _row(parser: ArgumentParser, action: argparse.Action) -> str:
    takes = parser._get_formatter()
    names = ", ".join(action.option_strings)
    if action.option_strings:
        metavar = takes._get_default_metavar_for_optional(action)
    else:
        metavar = action.dest
    if action.nargs != 0:
        value = takes._format_args(action, metavar)
    else:
        value = ""
    name = f"{names} {value}".strip().replace("|", "\\|")
    if action.required and action.option_strings:
        required = " (required)"
    else:
        required = ""
    if action.help:
        says = takes._expand_help(action)
    else:
        says = ""
    # Angle brackets and bars would be the page's own.
    says = re.sub(r"(?<!`)<(\w+)>", r"`<\1>`", says).replace("|", "\\|").replace("*", "\\*")
    return f"| `{name}` | {says}{required} |"


def _text(text: str) -> Iterator[str]:
    """A description or an epilog: paragraphs as they are, what is set off as code."""
    text = re.sub(r"^headwise [\w-]+: ", "", text.strip("\n"))
    if text[:9] != "headwise ":
        text = text[:1].upper() + text[1:]
    for part in re.split(r"\n\s*\n", text):
        rows = part.strip("\n").split("\n")
        if not part.strip():
            continue
        if is_set_off(part):
            yield from ("```text", *dedent("\n".join(rows)).split("\n"), "```", "")
        else:
            yield from (*rows, "")


def parser() -> ArgumentParser:
    """The command line of python -m headwise.command_page."""
    p = ArgumentParser(prog="python -m headwise.command_page", description=__doc__)
    arguments.add_out(p, "Markdown to write (default: print it)", required=False)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    out: Path | None = parser().parse_args(argv).out
    text: Any = page()
    if out is None:
        print(text, end="")
    else:
        atomic_write(out, text.encode())
    return 0


if __name__ == "__main__":
    run_command(main)
