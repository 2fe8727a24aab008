"""Options of a command, each declared once as a field of its Config, with default and range.

    @dataclass(frozen=True, kw_only=True)
    class Config:
        model: str = shared(arguments.add_model)
        samples: int = option("prompts of each task", default=2, within=at_least(1))

        def __post_init__(self) -> None:
            check_ranges(self)

`add_arguments(parser, Config)` adds them, `config_of(Config, options)` makes one of what was typed,
and `config_by_name(Config, options)` one of what Python gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from artifacts.cli import arguments
from artifacts.cli.command import ADVANCED, ArgumentParser
from artifacts.errors import HeadwiseError

C = TypeVar("C")
_TYPES = {"int": int, "float": float, "Path": Path}
# Values that Python may give for a field, by its type.
_GIVEN: dict[str, tuple[type, str]] = {
    "bool": (bool, "True or False"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "a text"),
    "Path": (Path, "a path"),
}
Range = tuple[Callable[[Any], bool], str]
"""Test of a value, and the values that pass it in words."""
POSITIVE: Range = (lambda value: 0 < value < inf, "a positive number")
BETWEEN_0_AND_1: Range = (lambda value: 0 < value < 1, "between 0 and 1")
SHARE: Range = (lambda value: 0 < value <= 1, "above 0 and at most 1")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def at_least(least: float) -> Range:
    """Range from `least` on; NaN is not in it."""
    return (lambda value: value >= least, f"at least {least}")


def bytes_of(text: str, option: str) -> int:
    """Parse the bytes in a text such as 67108864 or 64MiB, a command's `option`.

    Raises:
        HeadwiseError: it is no positive number with a known unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise HeadwiseError(
            f"{option} must be a number of bytes such as 67108864 or 64MiB, got {text!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def arg(
    *flags: str,
    default: Any = MISSING,
    group: str | None = None,
    advanced: bool = False,
    either: str | None = None,
    within: Range | None = None,
    read: Callable[[str], Any] | None = None,
    **keywords: Any,
) -> Any:
    """A field of a Config and its argument.

    Args:
        flags, keywords: as argparse has them; without flags it is a positional one. The type is the
            field's, and a number's default is said in the help.
        default: None is no value: the argument was not given.
        group: heading in the help.
        advanced: few need it: in the help it comes last.
        either: name of a set of arguments of which one has to be given.
        within: what it may be; `check_ranges` refuses the rest.
        read: makes the value of the text, and raises HeadwiseError of its own where it cannot.
    """
    if advanced:
        group = ADVANCED
    own = {
        "flags": flags,
        "group": group,
        "either": either,
        "within": within,
        "read": read,
        "keywords": keywords,
    }
    return field(default=default, metadata=own)


def option(help: str | None = None, *, default: Any, **keywords: Any) -> Any:
    """The same for an option that is called as its field is: max_error is --max-error."""
    return arg("", default=default, help=help, **keywords)


def shared(
    add: Callable[..., None],
    *given: Any,
    default: Any = MISSING,
    within: Range | None = None,
    **keywords: Any,
) -> Any:
    """A field whose argument is one of cli.arguments: add(parser, *given, **keywords) adds it."""
    if add in arguments.ADVANCED:
        group = ADVANCED
    else:
        group = None
    return field(
        default=default,
        metadata={"add": lambda p: add(p, *given, **keywords), "group": group, "within": within},
    )


def nested(config: type[Any]) -> Any:
    """A field that is a Config of its own, whose fields are options of the same command."""
    return field(default_factory=config, metadata={"config": config})


def add_arguments(
    parser: ArgumentParser,
    config: type[Any],
    names: Collection[str] | None = None,
) -> None:
    """Give the parser the options that a Config's fields declare; other fields are no options.

    Args:
        names: only these fields, of a Config that shares the parser with others.
    """
    sets: dict[str, Any] = {}
    for each in fields(config):
        if names is not None and each.name not in names:
            continue
        # What is repeated begins empty; `config_of` leaves out what was not given.
        given = None
        if each.default is not MISSING and not isinstance(each.default, tuple):
            given = each.default
        if "config" in each.metadata:
            add_arguments(parser, each.metadata["config"])
        group = each.metadata.get("group")
        to = parser if group is None else parser.heading(group)
        if "add" in each.metadata:
            each.metadata["add"](to)
            if given is not None:
                parser.set_defaults(**{each.name: given})
        elif "flags" in each.metadata:
            flags = each.metadata["flags"]
            either = each.metadata["either"]
            keywords = _typed(each)
            if either is not None:
                if either not in sets:
                    sets[either] = parser.add_mutually_exclusive_group(required=True)
                to = sets[either]
            if flags == ("",):
                flags = (_flag(each),)
            if not flags:
                to.add_argument(each.name, **keywords)
            else:
                required = {"required": True} if each.default is MISSING else {"default": given}
                to.add_argument(*flags, dest=each.name, **required, **keywords)


def _flag(each: Field[Any]) -> str:
    return f"--{each.name.replace('_', '-')}"


def _typed(each: Field[Any]) -> dict[str, Any]:
    """Arguments for argparse of a field, with its type, and its default in the help."""
    keywords = dict(each.metadata["keywords"])
    kind = _TYPES.get(str(each.type).partition(" |")[0])
    if (
        kind is not None
        and not {"action", "type", "choices"} & keywords.keys()
        and each.metadata["read"] is None
    ):
        keywords["type"] = kind
    number = isinstance(each.default, int | float) and not isinstance(each.default, bool)
    if number and "(default" not in (says := keywords.get("help") or ""):
        keywords["help"] = f"{says} (default %(default)s)".lstrip()
    return keywords


def config_of(config: type[C], options: Mapping[str, Any], /, **more: Any) -> C:
    """The Config of a command line's options, among which others may be for other Configs; `more`
    wins."""
    typed: dict[str, Any] = {}
    for each in fields(config):  # type: ignore[arg-type]
        if "config" in each.metadata:
            typed[each.name] = config_of(each.metadata["config"], options)
        elif each.name in options:
            value = options[each.name]
            # None stands for the default, unless the option may be None itself.
            if value is None and not str(each.type).endswith("None"):
                continue
            read = each.metadata.get("read")
            if read is not None and isinstance(value, str):
                value = read(value)
            if isinstance(value, list):
                value = tuple(value)
            typed[each.name] = value
    return config(**typed | more)


def config_by_name(config: type[C], options: Mapping[str, Any], /, **fixed: Any) -> C:
    """The Config of options that Python gives by their fields' names.

    Args:
        config: the Config.
        options: values as the fields have them; a path may be text, and of a field that takes
            several values one is enough.
        fixed: fields that are no options.

    Raises:
        HeadwiseError: an option is unknown, or its value of another type.
    """
    known = {name: each for name, each in _options(config).items() if name not in fixed}
    given = {}
    for name, value in options.items():
        if name not in known:
            raise HeadwiseError(f"unknown option {name!r}; known: {', '.join(known)}")
        given[name] = _as_typed(known[name], value)
    return config_of(config, given, **fixed)


def _options(config: type[Any]) -> dict[str, Field[Any]]:
    """The fields that are options, by name, those of nested Configs too."""
    known: dict[str, Field[Any]] = {}
    for each in fields(config):
        if "config" in each.metadata:
            known |= _options(each.metadata["config"])
        elif each.metadata:
            known[each.name] = each
    return known


def _as_typed(each: Field[Any], value: Any) -> Any:
    """A value from Python as a field has it.

    Raises:
        HeadwiseError: it is of another type.
    """
    if value is None:
        return None
    if str(each.type).startswith("tuple["):
        kind = str(each.type).removeprefix("tuple[").partition(",")[0]
        if not isinstance(value, list | tuple):
            value = (value,)
        return tuple(_single(each, kind, part) for part in value)
    if each.metadata.get("read") is not None and isinstance(value, str):
        return value
    return _single(each, str(each.type).partition(" |")[0], value)


def _single(each: Field[Any], kind: str, value: Any) -> Any:
    """One value of a field, of the type of this name; of types that are not listed any."""
    if kind == "Path" and isinstance(value, str):
        value = Path(value)
    if kind in _GIVEN:
        wanted, words = _GIVEN[kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
            raise HeadwiseError(f"{each.name} must be {words}, got {value!r}")
    choices = each.metadata.get("keywords", {}).get("choices")
    if choices is not None and value not in choices:
        raise HeadwiseError(f"{each.name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def check_ranges(config: Any) -> None:
    """Raise HeadwiseError for a value that its field does not allow; None is no value."""
    for each in fields(config):
        within = each.metadata.get("within")
        value = getattr(config, each.name)
        if within is not None and value is not None and not within[0](value):
            flag = next(iter(each.metadata.get("flags", ())), "") or _flag(each)
            raise HeadwiseError(f"{flag} must be {within[1]}, got {value}")
