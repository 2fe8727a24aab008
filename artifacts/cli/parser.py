"""argparse's parser of a command, made from the fields of its Config."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from artifacts.cli.command import BAD_USE, complain, one_process, set_verbosity
from artifacts.cli.options import (
    ADVANCED,
    Arg,
    CommandConfig,
    argument,
    build,
    flags,
    metadata,
    nested,
    value_type,
)
from artifacts.cli.passwords import without_password

C = TypeVar("C", bound=CommandConfig)
_ALWAYS = "every command: -q no progress and no warnings, -v more on stderr, --version"
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Formatter with only required arguments in the usage, and filled paragraphs."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """Add the usage as argparse does, with the arguments that are required."""
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


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors, no abbreviations, kept line breaks, -q, -v and --version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.add_argument("-q", "--quiet", action=_Verbosity, const=-1)
        self.add_argument("-v", "--verbose", action=_Verbosity, const=1)
        self.add_argument("--version", action=_Version)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, after resetting the verbosity of an earlier call."""
        set_verbosity(0)
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            usage = " ".join(self.format_usage().split())
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {usage}")
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
        complain(f"{message} (see {self.prog} --help)")
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


def parser_of(
    config: type[CommandConfig], prog: str, description: str | None, epilog: str | None = None
) -> ArgumentParser:
    """Make the parser of a command.

    Args:
        config: its Config class; each field with an Arg is an argument.
        prog: words that start the command.
        description: start of its help.
        epilog: end of its help.
    """
    usage = None
    if (rest := _rest(config)) is not None:
        arg = argument(config.model_fields[rest])
        usage = f"{prog} [{arg and arg.metavar}]"
    parser = ArgumentParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        add_help=rest is None,
    )
    if rest is None:
        _add_fields(parser, config)
    return parser


def read(parser: ArgumentParser, config: type[C], words: Sequence[str], command: str) -> C:
    """Parse a command line.

    Args:
        parser: made by `parser_of` for the Config.
        config: Config class.
        words: the command line after the command's name.
        command: whole command line, for the field of that name.

    Raises:
        HeadwiseError: a value is wrong. What argparse refuses ends the process.
    """
    if (rest := _rest(config)) is not None:
        return build(config, {rest: tuple(words)})
    typed = vars(parser.parse_args(words))
    if "command" in config.model_fields:
        typed["command"] = command
    return build(config, typed)


def parser_of_verb(module: Any, verb: str) -> ArgumentParser:
    """Make the parser of a verb from its module: Config, docstring, and EXAMPLES if any."""
    examples = getattr(module, "EXAMPLES", None)
    return parser_of(module.Config, f"headwise {verb}", module.__doc__, examples)


def run_verb(module: Any, verb: str, words: Sequence[str]) -> int:
    """Run a verb's module on the words after it, and return the exit status.

    Raises:
        HeadwiseError: a value is wrong, or torchrun starts several ranks of a one-process command.
    """
    typed = f"headwise {verb} {shlex.join(map(without_password, words))}".rstrip()
    config = read(parser_of_verb(module, verb), module.Config, words, typed)
    if not module.Config.shares_work:
        one_process(f"headwise {verb}")
    return int(module.run(config))


def _rest(config: type[CommandConfig]) -> str | None:
    """Return the field that takes all words, options too, for another program's parser."""
    for name, field in config.model_fields.items():
        if (arg := argument(field)) is not None and arg.nargs == argparse.REMAINDER:
            return name
    return None


def _add_fields(parser: ArgumentParser, config: type[CommandConfig]) -> None:
    sets: dict[str, Any] = {}
    for name, field in config.model_fields.items():
        if (part := nested(field)) is not None:
            _add_fields(parser, part)
        if (arg := argument(field)) is None:
            continue
        to: Any = parser
        if arg.either is not None:
            if arg.either not in sets:
                sets[arg.either] = parser.add_mutually_exclusive_group(required=True)
            to = sets[arg.either]
        elif arg.group is not None:
            to = parser.heading(arg.group)
        keywords = _keywords(field, arg)
        if names := flags(name, field):
            to.add_argument(*names, dest=name, required=field.is_required(), **keywords)
        else:
            to.add_argument(name, **keywords)


def _keywords(field: FieldInfo, arg: Arg) -> dict[str, Any]:
    """Return the keywords of add_argument for a field."""
    kind, several = value_type(field.annotation)
    # A missing option is not in the namespace: the Config has the defaults.
    keywords: dict[str, Any] = {"help": _help(field, arg), "default": argparse.SUPPRESS}
    if kind is bool:
        on = "store_false" if field.default is True else "store_true"
        return {**keywords, "action": argparse.BooleanOptionalAction if arg.both else on}
    choices = arg.choices
    if get_origin(kind) is Literal:
        choices = get_args(kind)
    if choices is not None:
        keywords["choices"] = choices
    elif kind in _METAVARS and not _reads_text(field):
        keywords["type"] = kind
    if (metavar := arg.metavar or _METAVARS.get(keywords.get("type"))) is not None:
        keywords["metavar"] = metavar
    if arg.repeat:
        keywords["action"] = "append"
    elif arg.nargs is not None:
        keywords["nargs"] = arg.nargs
        if arg.nargs == "?":
            # --json without a file.
            keywords["const"] = "-"
    elif several:
        keywords["nargs"] = "+"
    elif arg.flags == () and not field.is_required():
        # argparse takes SUPPRESS for a value here.
        keywords |= {"nargs": "?", "default": None}
    return keywords


def _reads_text(field: FieldInfo) -> bool:
    """True if a validator of the field parses the text itself."""
    every = (*metadata(field.annotation), *field.metadata)
    return any(isinstance(each, BeforeValidator) for each in every)


def _help(field: FieldInfo, arg: Arg) -> str | None:
    """Return the help text, with the default of a number."""
    number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
    text = arg.help or ""
    if number and "(default" not in text:
        text = f"{text} (default {field.default})".lstrip()
    return text.replace("%", "%%") or None
