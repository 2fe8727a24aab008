"""Options of a command, each declared once as a field of its Config, with default and range.

    @dataclass(frozen=True, kw_only=True)
    class Config:
        model: str = shared(arguments.add_model)
        samples: int = option("prompts of each task", default=2, within=at_least(1))

        def __post_init__(self) -> None:
            check_ranges(self)

`add_arguments(parser, Config)` adds the arguments to a parser. `config_of(Config, options)` builds
a Config from parsed arguments, and `config_by_name(Config, options)` from Python values.
"""

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
# Allowed Python values of a field, by the name of its type.
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
    """Range of numbers >= `least`, without NaN."""
    return (lambda value: value >= least, f"at least {least}")


def bytes_of(text: str, option: str) -> int:
    """Parse a size in bytes such as 67108864 or 64MiB, the value of `option`.

    Raises:
        HeadwiseError: the text is not a positive number with a known unit.
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
        flags: as in argparse; without flags the argument is positional.
        default: value of a missing argument; None means no value.
        group: heading in the help.
        advanced: True for a rarely needed argument, which the help lists last.
        either: name of a set of arguments of which exactly one is required.
        within: allowed range; `check_ranges` rejects other values.
        read: converts the text to the value; raises HeadwiseError for an invalid text.
        keywords: as in argparse. The type is the type of the field, and the help shows the default
            of a number.
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
    """Declare a field and its option, named after the field: max_error is --max-error."""
    return arg("", default=default, help=help, **keywords)


def shared(
    add: Callable[..., None],
    *given: Any,
    default: Any = MISSING,
    within: Range | None = None,
    **keywords: Any,
) -> Any:
    """Declare a field with a shared argument: `add` from cli.arguments adds it to the parser."""
    if add in arguments.ADVANCED:
        group = ADVANCED
    else:
        group = None
    return field(
        default=default,
        metadata={"add": lambda p: add(p, *given, **keywords), "group": group, "within": within},
    )


def nested(config: type[Any]) -> Any:
    """Declare a nested Config, whose fields are options of the same command."""
    return field(default_factory=config, metadata={"config": config})


def add_arguments(
    parser: ArgumentParser,
    config: type[Any],
    names: Collection[str] | None = None,
) -> None:
    """Add the options that the fields of a Config declare; skip fields without an option.

    Args:
        parser: parser to extend.
        config: Config class with the fields.
        names: if set, add only these fields, for a parser with several Configs.
    """
    sets: dict[str, Any] = {}
    for each in fields(config):
        if names is not None and each.name not in names:
            continue
        # A repeated option starts empty; `config_of` omits missing options.
        default = None
        if each.default is not MISSING and not isinstance(each.default, tuple):
            default = each.default
        if "config" in each.metadata:
            add_arguments(parser, each.metadata["config"])
        group = each.metadata.get("group")
        to = parser if group is None else parser.heading(group)
        if "add" in each.metadata:
            each.metadata["add"](to)
            if default is not None:
                parser.set_defaults(**{each.name: default})
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
                required = {"required": True} if each.default is MISSING else {"default": default}
                to.add_argument(*flags, dest=each.name, **required, **keywords)


def _flag(each: Field[Any]) -> str:
    return f"--{each.name.replace('_', '-')}"


def _typed(each: Field[Any]) -> dict[str, Any]:
    """Return the argparse arguments of a field: its type, and its default in the help."""
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
    """Build a Config from the options of a command line.

    Args:
        config: Config class.
        options: parsed options; options of other Configs are ignored.
        more: fields that take precedence over `options`.
    """
    typed: dict[str, Any] = {}
    for each in fields(config):  # type: ignore[arg-type]
        if "config" in each.metadata:
            typed[each.name] = config_of(each.metadata["config"], options)
        elif each.name in options:
            value = options[each.name]
            # None means the default, unless None is an allowed value of the option.
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
    """Build a Config from Python values by field name.

    Args:
        config: Config class.
        options: values with the types of the fields. A path may be text, and a field with several
            values accepts a single one.
        fixed: fields that are not options.

    Raises:
        HeadwiseError: an option is unknown, or its value has the wrong type.
    """
    declared = {name: each for name, each in _options(config).items() if name not in fixed}
    values = {}
    for name, value in options.items():
        if name not in declared:
            raise HeadwiseError(f"unknown option {name!r}; known: {', '.join(declared)}")
        values[name] = _as_typed(declared[name], value)
    return config_of(config, values, **fixed)


def _options(config: type[Any]) -> dict[str, Field[Any]]:
    """Return the fields that are options by name, including those of nested Configs."""
    declared: dict[str, Field[Any]] = {}
    for each in fields(config):
        if "config" in each.metadata:
            declared |= _options(each.metadata["config"])
        elif each.metadata:
            declared[each.name] = each
    return declared


def _as_typed(each: Field[Any], value: Any) -> Any:
    """Convert a Python value to the type of a field.

    Raises:
        HeadwiseError: the value has the wrong type.
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
    """Check one value of a field by type name; types that are not listed accept any value."""
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
    """Raise HeadwiseError for a value outside the range of its field; None is allowed."""
    for each in fields(config):
        within = each.metadata.get("within")
        value = getattr(config, each.name)
        if within is not None and value is not None and not within[0](value):
            flag = next(iter(each.metadata.get("flags", ())), "") or _flag(each)
            raise HeadwiseError(f"{flag} must be {within[1]}, got {value}")
