"""Parser and main of every command: one-line errors, exit codes, -q, -v and --version.

Exit codes: 0 good, 1 a bug (with traceback), 2 a mistake of the user, 3 a finding, such as a gate
that fails, 130 interrupted, 141 the reader of the output went away. artifacts.cli.arguments has the
arguments that commands share."""

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
# As large as a field of an artifact may be (artifacts.schema.fields, which takes long to import).
LARGEST = 2**31 - 1
BROKEN_PIPE = 141
# -1 with -q, 1 with -v: see set_verbosity.
verbosity = 0
# Set by what has threads that would not survive the interpreter's end: the exit code would be
# theirs.
leave_at_once = False
# The heading of options that few need, the last of a command's help.
ADVANCED = "advanced"
_ALWAYS = "every command: -q no progress and no warnings, -v more on stderr, --version"
# Packages that serving does without, and the extra that installs each.
EXTRAS = {
    "jinja2": "search",
    "lm_eval": "lm-eval",
    "matplotlib": "search",
    "optuna": "search",
}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Usage of required arguments alone, filled paragraphs, and metavars by type."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """As argparse; with a prefix it is the name that verbs go by."""
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
        shares_work: True if the command shares its work over the ranks of torchrun. Any other
            command refuses to run in several, each of which would write the same files.
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
        """As argparse; what -q or -v of an earlier call set is set back.

        Raises:
            HeadwiseError: torchrun starts several ranks of a command that does not share its work.
        """
        set_verbosity(0)
        parsed = super().parse_args(args, namespace)
        if not self.shares_work:
            one_process(self.prog)
        return parsed

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse; `--json cfg.yaml` is no request to write over an artifact."""
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
        """The options under this heading, which is there once."""
        for group in self._action_groups:
            if group.title == title:
                return group
        return self.add_argument_group(title)

    def format_help(self) -> str:
        """As argparse, with what few need at the end, and what every command takes in a line."""
        self._action_groups.sort(key=lambda group: group.title == ADVANCED)
        return f"{super().format_help()}\n{_ALWAYS}\n"

    def error(self, message: str) -> NoReturn:
        """Print `error: ...` with where to find help, and exit with status 2."""
        _complain(f"{message} (see {self.prog} --help)")
        sys.exit(BAD_USE)


def is_set_off(paragraph: str) -> bool:
    """True for commands, lists and tables, whose line breaks count."""
    rows = paragraph.strip("\n").split("\n")
    return any(re.match(r"\s{2,}\S|headwise .* --|\S+\s{3,}\S", row) for row in rows)


class _Verbosity(argparse.Action):
    """Has its effect at once, and leaves nothing in the namespace."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: int) -> None:
        nothing = argparse.SUPPRESS
        super().__init__(
            option_strings, nothing, nargs=0, const=const, default=nothing, help=nothing
        )

    def __call__(self, *args: Any) -> None:
        set_verbosity(self.const)


class _Version(argparse.Action):
    """Prints and exits; the version is looked up where it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        nothing = argparse.SUPPRESS
        super().__init__(option_strings, nothing, nargs=0, default=nothing, help=nothing)

    def __call__(self, *args: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"headwise {version('headwise')}")
        sys.exit(0)


def set_verbosity(level: int) -> None:
    """Set -1: no progress, no warnings; 0: the default; 1: log messages and tracebacks."""
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
    """Raise HeadwiseError where torchrun starts several ranks of a one-process command."""
    if (count := launch_number("WORLD_SIZE", 1)) > 1:
        raise HeadwiseError(
            f"{command} is for one process, got {count} of a launch: start it without torchrun"
        )


def natural(text: str) -> int:
    """A whole number from 0 on, as an argument's type."""
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
    """Standard output that says in a line why it cannot be written, such as a full disk."""

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

    An interruption ends with one line and status 130, a closed pipe silently with 141, and output
    that is closed or cannot be written as a mistake of the user; any other exception keeps its
    traceback."""
    code: Any
    try:
        _prepare_output()
        try:
            code = main(None if argv is None else list(argv))
        except SystemExit as done:
            # --help prints, too.
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
        # A name that the terminal's encoding lacks is no reason to fail.
        sys.stdout = _Output(
            sys.stdout.detach(), encoding, "backslashreplace", line_buffering=lines
        )


def _complain(message: str) -> None:
    print(one_line(f"error: {message}"), file=sys.stderr)


def _discard(stream: TextIO | None) -> None:
    """Redirect a stream that cannot be written, so that the flush at exit does not complain."""
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
