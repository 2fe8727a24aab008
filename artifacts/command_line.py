"""What every `python -m ...` command of Headwise shares: one-line errors and exit codes.

Exit codes: 0 done, 1 a bug (with traceback), 2 a mistake of the user, 130 interrupted, 141 the reader of the
output went away.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from artifacts.errors import HeadwiseError, one_line

BAD_USE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
# What serving does without -> the extra that installs it.
EXTRAS = {"matplotlib": "search", "optuna": "search"}


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


def run_command(main: Callable[[list[str] | None], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command's main and exit: HeadwiseError becomes one line `error: ...` on stderr and status 2.

    An interruption ends with one line and status 130, a closed pipe silently with 141; any other exception
    keeps its traceback.
    """
    if hasattr(sys.stdout, "reconfigure"):
        # A name that the terminal's encoding lacks is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main(None if argv is None else list(argv))
        sys.stdout.flush()
    except HeadwiseError as error:
        _complain(str(error))
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
    sys.exit(code or 0)


def require(package: str) -> None:
    """Raise ImportError where a package of EXTRAS is not installed.

    `python -m ...` that is about to import the command's own module ends with one line and status 2 instead.
    """
    if importlib.util.find_spec(package) is not None:
        return
    if sys.argv[:1] == ["-m"]:
        _complain(_how_to_install(package))
        sys.exit(BAD_USE)
    raise ModuleNotFoundError(_how_to_install(package), name=package)


def _how_to_install(package: str) -> str:
    return f"{package} is not installed: pip install 'headwise[{EXTRAS[package]}]'"


def _complain(message: str) -> None:
    print(f"error: {one_line(message)}", file=sys.stderr)


def _discard(stream: TextIO) -> None:
    """Point the stream nowhere, or the interpreter's flush at exit complains about the closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
