"""What every `python -m ...` command of Headwise shares: one-line errors and exit codes.

Exit codes: 0 done, 1 a bug (with traceback), 2 a mistake of the user, 130 interrupted, 141 the reader of the
output went away.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from artifacts.errors import HeadwiseError, one_line, reason
from artifacts.interrupt import INTERRUPTED as INTERRUPTED
from artifacts.interrupt import listen_as_usual

BAD_USE = 2
# As large as a field of an artifact may be (artifacts.fields, which takes long to import).
LARGEST = 2**31 - 1
BROKEN_PIPE = 141
# Set by what has threads that would not survive the interpreter's end: the exit code would be theirs.
leave_at_once = False
# What serving does without -> the extra that installs it.
EXTRAS = {"matplotlib": "search", "openvino": "rivals", "openvino_genai": "rivals", "optuna": "search"}


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors, no abbreviated options, and help texts that keep their line breaks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print `error: ...` with where to find help, and exit with status 2."""
        _complain(f"{message} (see {self.prog} --help)")
        sys.exit(BAD_USE)


def natural(text: str) -> int:
    """A whole number from 0 on, as an argument's type."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {LARGEST}, got {text!r}")
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


def run_command(main: Callable[[list[str] | None], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command's main and exit: HeadwiseError becomes one line `error: ...` on stderr and status 2.

    An interruption ends with one line and status 130, from the command's start on (artifacts.interrupt), a closed pipe
    silently with 141, and output that is closed or cannot be written as a mistake of the user; any other exception
    keeps its traceback.
    """
    code: Any
    try:
        _prepare_output()
        listen_as_usual()
        try:
            code = main(None if argv is None else list(argv))
        except SystemExit as done:
            # --help prints, too.
            code = done.code
        sys.stdout.flush()
    except HeadwiseError as error:
        _complain(str(error))
        _discard(sys.stdout)
        code = BAD_USE
    except ModuleNotFoundError as error:
        if error.name is None or (package := error.name.partition(".")[0]) not in EXTRAS:
            raise
        _complain(_how_to_install(package))
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
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code or 0)


def _prepare_output() -> None:
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise HeadwiseError("cannot write the output: it is closed")
    if type(sys.stdout) is io.TextIOWrapper:
        lines, encoding = sys.stdout.line_buffering, sys.stdout.encoding
        # A name that the terminal's encoding lacks is no reason to fail.
        sys.stdout = _Output(sys.stdout.detach(), encoding, "backslashreplace", line_buffering=lines)


def _how_to_install(package: str) -> str:
    return f"{package} is not installed: pip install 'headwise[{EXTRAS[package]}]'"


def _complain(message: str) -> None:
    print(f"error: {one_line(message)}", file=sys.stderr)


def _discard(stream: TextIO | None) -> None:
    """Point the stream nowhere where it cannot be written, or the interpreter's flush at exit complains about it."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, HeadwiseError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno() if stream is not None else 1)
        os.close(nowhere)
