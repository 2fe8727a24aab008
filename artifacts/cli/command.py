"""Parser and main of every command: one-line errors, exit codes, -q, -v and --version.

Exit codes:
    0: success.
    1: a bug, with a traceback.
    2: a user error.
    3: a finding, such as a failed gate.
    130: interrupted.
    141: the reader of the output closed the pipe.

artifacts.cli.arguments has the arguments that commands share.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from artifacts.cli.interrupt import INTERRUPTED as INTERRUPTED
from artifacts.errors import Finding, HeadwiseError, one_line, reason

BAD_USE = HeadwiseError.status
FOUND = Finding.status
# The limit of an artifact field; artifacts.schema.fields is not imported because it is slow.
LARGEST = 2**31 - 1
BROKEN_PIPE = 141
# -1 with -q, 1 with -v: see set_verbosity.
verbosity = 0
# Set by code whose threads do not survive interpreter shutdown and would change the exit code.
leave_at_once = False
# Heading of rarely needed options, at the end of a command's help.
ADVANCED = "advanced"
_ALWAYS = "every command: -q no progress and no warnings, -v more on stderr, --version"
# Packages that serving does not need, and the extra that installs each.
EXTRAS = {
    "jinja2": "search",
    "lm_eval": "lm-eval",
    "matplotlib": "search",
    "optuna": "search",
}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Formatter with only required arguments in the usage, filled paragraphs, typed metavars."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """Add the usage as argparse does; with a prefix it is the program name of the verbs."""
        if usage is None and prefix is None:
            either = [group for group in groups if group.required]
            in_one = [action for group in either for action in group._group_actions]
            needed = [a for a in actions if a.required or not a.option_strings or a in in_one]
            usage = (
                self._format_usage(None, needed, either, "").strip().replace("%", "%%")
                + " [options]"
            )
        super().add_usage(usage, actions, groups, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n\s*\n", text.strip("\n"))
        return "\n\n".join(
            part if is_set_off(part) else textwrap.fill(part, width) for part in paragraphs
        )

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        by_type: dict[Any, str] = {int: "N", natural: "N", float: "X", Path: "PATH"}
        return by_type.get(action.type) or super()._get_default_metavar_for_optional(action)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors, no abbreviations, kept line breaks, -q, -v and --version.

    Attributes:
        shares_work: True if the command distributes its work over the ranks of torchrun. Any other
            command refuses to run in several ranks, because each would write the same files.
    """

    def __init__(self, *args: Any, shares_work: bool = False, **kwargs: Any) -> None:
        self.shares_work = shares_work
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.add_argument("-q", "--quiet", action=_Verbosity, const=-1)
        self.add_argument("-v", "--verbose", action=_Verbosity, const=1)
        self.add_argument("--version", action=_Version)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, after resetting the verbosity of an earlier call.

        Raises:
            HeadwiseError: torchrun starts several ranks of a command without `shares_work`.
        """
        set_verbosity(0)
        parsed = super().parse_args(args, namespace)
        if not self.shares_work:
            one_process(self.prog)
        return parsed

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; `--json cfg.yaml` does not overwrite an artifact."""
        words = list(sys.argv[1:] if args is None else args)
        if "--" in words:
            last = words.index("--")
        else:
            last = len(words)
        if "--json" in self._option_string_actions and "--json" in words[:last]:
            at = words.index("--json")
            names_json = at + 1 < last and words[at + 1].endswith(".json")
            if names_json:
                target = words[at + 1]
            else:
                target = "-"
            words[at : at + 1 + names_json] = [f"--json={target}"]
        return super().parse_known_args(words, namespace)

    def heading(self, title: str) -> argparse._ArgumentGroup:
        """Return the argument group with this heading, and create it on first use."""
        for group in self._action_groups:
            if group.title == title:
                return group
        return self.add_argument_group(title)

    def format_help(self) -> str:
        """Format as argparse does: rare options last, options of every command in one line."""
        self._action_groups.sort(key=lambda group: group.title == ADVANCED)
        return f"{super().format_help()}\n{_ALWAYS}\n"

    def error(self, message: str) -> NoReturn:
        """Print `error: ...` with a hint to the help, and exit with status 2."""
        _complain(f"{message} (see {self.prog} --help)")
        sys.exit(BAD_USE)


def is_set_off(paragraph: str) -> bool:
    """True for commands, lists and tables, whose line breaks are kept."""
    rows = paragraph.strip("\n").split("\n")
    return any(re.match(r"\s{2,}\S|headwise .* --|\S+\s{3,}\S", row) for row in rows)


class _Verbosity(argparse.Action):
    """Action that sets the verbosity immediately and stores nothing in the namespace."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: int) -> None:
        nothing = argparse.SUPPRESS
        super().__init__(
            option_strings, nothing, nargs=0, const=const, default=nothing, help=nothing
        )

    def __call__(self, *args: Any) -> None:
        set_verbosity(self.const)


class _Version(argparse.Action):
    """Action that looks up the version on use, prints it and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        nothing = argparse.SUPPRESS
        super().__init__(option_strings, nothing, nargs=0, default=nothing, help=nothing)

    def __call__(self, *args: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"headwise {version('headwise')}")
        sys.exit(0)


def set_verbosity(level: int) -> None:
    """Set -1 (no progress, no warnings), 0 (default) or 1 (log messages and tracebacks)."""
    global verbosity
    if level != verbosity:
        import logging

        logging.getLogger("headwise").setLevel(
            {-1: logging.ERROR, 0: logging.NOTSET, 1: logging.INFO}[level]
        )
        if level > 0:
            logging.basicConfig(format="%(message)s")
    verbosity = level


def launch_number(name: str, default: int) -> int:
    """Return a number that torchrun sets in the environment, such as WORLD_SIZE."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise HeadwiseError(
            f"the environment's {name} must be a number, as torchrun sets it, got {text!r}"
        )
    return int(text)


def one_process(command: str) -> None:
    """Raise HeadwiseError if torchrun starts several ranks of a one-process command."""
    if (count := launch_number("WORLD_SIZE", 1)) > 1:
        raise HeadwiseError(
            f"{command} is for one process, got {count} of a launch: start it without torchrun"
        )


def natural(text: str) -> int:
    """Argument type: a whole number of at least 0."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 0 to {LARGEST}, got {text!r}"
        )
    return number


class _Output(io.TextIOWrapper):
    """Standard output that reports a failed write, such as a full disk, in one line."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise HeadwiseError(f"cannot write the output: {reason(error)}") from None

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise HeadwiseError(f"cannot write the output: {reason(error)}") from None


def run_command(
    main: Callable[[list[str] | None], int | None], argv: Sequence[str] | None = None
) -> NoReturn:
    """Run a command's main and exit; a HeadwiseError becomes `error: ...` on stderr and status 2.

    An interruption ends with one line and status 130, and a closed pipe silently with status 141.
    Output that is closed or cannot be written is a user error. Any other exception keeps its
    traceback.
    """
    code: Any
    try:
        _prepare_output()
        try:
            code = main(None if argv is None else list(argv))
        except SystemExit as done:
            # --help prints as well.
            code = done.code
        sys.stdout.flush()
    except HeadwiseError as error:
        if verbosity > 0:
            traceback.print_exc()
        _complain(str(error))
        _discard(sys.stdout)
        code = error.status
    except ModuleNotFoundError as error:
        if error.name is None or (package := error.name.partition(".")[0]) not in EXTRAS:
            raise
        _complain(f"{package} is not installed: pip install 'headwise[{EXTRAS[package]}]'")
        code = BAD_USE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        _discard(sys.stdout)
        code = BROKEN_PIPE
    if leave_at_once:
        for stream in (sys.stdout, sys.stderr):
            _discard(stream)
        if isinstance(code, int):
            status = code
        else:
            status = int(code is not None)
        os._exit(status)
    sys.exit(code or 0)


def _prepare_output() -> None:
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise HeadwiseError("cannot write the output: it is closed")
    if type(sys.stdout) is io.TextIOWrapper:
        lines = sys.stdout.line_buffering
        encoding = sys.stdout.encoding
        # A character that the terminal cannot encode must not cause a failure.
        sys.stdout = _Output(
            sys.stdout.detach(), encoding, "backslashreplace", line_buffering=lines
        )


def _complain(message: str) -> None:
    print(one_line(f"error: {message}"), file=sys.stderr)


def _discard(stream: TextIO | None) -> None:
    """Redirect a stream that cannot be written, so that the flush at exit does not fail."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, HeadwiseError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if stream is not None:
            number = stream.fileno()
        else:
            number = 1
        os.dup2(nowhere, number)
        os.close(nowhere)
