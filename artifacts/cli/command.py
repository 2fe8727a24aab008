"""Errors in one line, exit codes and verbosity of every command.

Exit codes:
    0: success.
    1: a bug, with a traceback.
    2: a user error.
    3: a finding, such as a failed gate.
    130: interrupted.
    141: the reader of the output closed the pipe.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from artifacts.cli.interrupt import INTERRUPTED as INTERRUPTED
from artifacts.errors import Finding, HeadwiseError, one_line, reason

BAD_USE = HeadwiseError.status
FOUND = Finding.status
BROKEN_PIPE = 141
# -1 with -q, 1 with -v: see set_verbosity.
verbosity = 0
# Set by code whose threads do not survive interpreter shutdown and would change the exit code.
leave_at_once = False
# Packages that serving does not need, and the extra that installs each.
EXTRAS = {
    "jinja2": "search",
    "lm_eval": "lm-eval",
    "matplotlib": "search",
    "optuna": "search",
}


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
        complain(str(error))
        _discard(sys.stdout)
        code = error.status
    except ModuleNotFoundError as error:
        if error.name is None or (package := error.name.partition(".")[0]) not in EXTRAS:
            raise
        complain(f"{package} is not installed: pip install 'headwise[{EXTRAS[package]}]'")
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


def complain(message: str) -> None:
    """Print `error: ...` on stderr, as one line."""
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
