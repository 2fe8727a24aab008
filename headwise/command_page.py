"""docs/commands.md: what `headwise VERB --help` prints, for every command.

python -m headwise.command_page docs/commands.md
"""

from __future__ import annotations

import os
from pathlib import Path

from artifacts.cli.parser import ArgumentParser
from headwise.__main__ import GROUPS, parser_of

_INTRO = """\
# Commands

The exit status is 0 for success, 1 for a bug (with a traceback), 2 for bad input (one line),
3 for a finding such as a failed gate, and 130 after Ctrl-C."""


def page() -> str:
    """The page as Markdown; help has the width of the environment's COLUMNS."""
    parts = [_INTRO]
    for group, verbs in GROUPS.items():
        parts.append(f"## {group.capitalize()}")
        for verb in verbs:
            parts.append(f"### headwise {verb}\n\n```text\n{parser_of(verb).format_help()}```")
    return "\n\n".join(parts) + "\n"


def parser() -> ArgumentParser:
    """The command line of this page's writer."""
    p = ArgumentParser(prog="python -m headwise.command_page", description=__doc__)
    p.add_argument("file", type=Path, help="Markdown to write")
    return p


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    parser().parse_args().file.write_text(page(), encoding="utf-8")
