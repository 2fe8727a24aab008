"""Options of a command: the fields of its Config, with help, range and choices.

    class Config(CommandConfig):
        model: ModelName
        samples: Annotated[int, Arg("prompts of each task"), Field(ge=1)] = 2

artifacts.cli.parser makes the command line of a Config. A Config is also built from Python values,
by its constructor. Wrong values raise HeadwiseError with one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from artifacts.errors import HeadwiseError, shorten

C = TypeVar("C", bound="CommandConfig")
# The limit of an artifact field; artifacts.schema.fields is not imported because it is slow.
LARGEST = 2**31 - 1
# Heading of rarely needed options, at the end of a command's help.
ADVANCED = "advanced"
# Ranges of a number, for annotations.
SHARE = Field(gt=0, le=1)
BETWEEN_0_AND_1 = Field(gt=0, lt=1)
POSITIVE = Field(gt=0, allow_inf_nan=False)
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}
# Values that a type allows, by the type of pydantic's error.
_WORDS = {
    "bool_type": "True or False",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "is_instance_of": "a path",
    "finite_number": "finite",
}


@dataclass(frozen=True)
class Arg:
    """The argument of a field. Of several, as an alias and a field have, the last value counts.

    Attributes:
        help: text of the help page, which adds the default of a number.
        flags: as in argparse, () for a positional argument; None: --name, of a switch that is on
            by default --no-name.
        metavar: name of the value; None: by its type.
        group: heading in the help.
        either: name of a set of arguments of which exactly one is required.
        choices: allowed texts that are not in the type.
        nargs: as in argparse; None: by the type.
        repeat: True if the option is repeated for several values.
        both: True for --name and --no-name.
    """

    help: str | None = None
    flags: tuple[str, ...] | None = None
    metavar: str | None = None
    group: str | None = None
    either: str | None = None
    choices: Sequence[str] | None = None
    nargs: str | None = None
    repeat: bool | None = None
    both: bool | None = None


class CommandConfig(BaseModel):
    """Base of the Config of each command, and of parts of it.

    Attributes:
        shares_work: True if the command distributes its work over the ranks of torchrun. Any other
            command refuses to run in several ranks, because each would write the same files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    shares_work: ClassVar[bool] = False

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise HeadwiseError(_explain(type(self), error)) from None

    @model_validator(mode="before")
    @classmethod
    def _convert(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Accept text for a path, and a list or a single value where there may be several."""
        converted = dict(values)
        for name, value in values.items():
            if name not in cls.model_fields or value is None:
                continue
            kind, several = value_type(cls.model_fields[name].annotation)
            if several:
                parts = value if isinstance(value, list | tuple) else (value,)
                converted[name] = tuple(_as_path(kind, part) for part in parts)
            else:
                converted[name] = _as_path(kind, value)
        return converted

    def replace(self, **changes: Any) -> Self:
        """Copy with other values, which are checked."""
        typed = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**typed, **changes})

    def settings(self) -> dict[str, Any]:
        """Return the options as plain data, without how the command was called."""
        return self.model_dump(exclude={"command", "as_json", "fresh"})


def _as_path(kind: Any, value: Any) -> Any:
    return Path(value) if kind is Path and isinstance(value, str) else value


def bytes_of(value: Any, option: str) -> Any:
    """Parse a size in bytes such as 67108864 or 64MiB, the value of `option`; only a text.

    Raises:
        HeadwiseError: the text is not a positive number with a known unit.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise HeadwiseError(
            f"{option} must be a number of bytes such as 67108864 or 64MiB, got {value!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def metadata(annotation: Any) -> Iterator[Any]:
    """Yield what Annotated adds to a type and to its parts, inner ones first."""
    if get_origin(annotation) is Annotated:
        inner, *added = get_args(annotation)
        yield from metadata(inner)
        for each in added:
            yield from each.metadata if isinstance(each, FieldInfo) else (each,)
    else:
        for part in get_args(annotation):
            yield from metadata(part)


def argument(field: FieldInfo) -> Arg | None:
    """Return the argument of a field; None for a field that is no option."""
    declared = [each for each in _metadata_of(field) if isinstance(each, Arg)]
    if not declared:
        return None
    merged: dict[str, Any] = {}
    for arg in declared:
        values = {item.name: getattr(arg, item.name) for item in fields(arg)}
        merged |= {name: value for name, value in values.items() if value is not None}
    return Arg(**merged)


def _metadata_of(field: FieldInfo) -> Iterator[Any]:
    yield from metadata(field.annotation)
    yield from field.metadata


def value_type(annotation: Any) -> tuple[Any, bool]:
    """Return the type of one value, without None, and whether there may be several."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Annotated:
        return value_type(parts[0])
    if origin in (Union, UnionType):
        return value_type(next(part for part in parts if part is not type(None)))
    if origin is tuple and parts[-1] is Ellipsis:
        return value_type(parts[0])[0], True
    return annotation, False


def nested(field: FieldInfo) -> type[CommandConfig] | None:
    """Return the class of a field whose own fields are options of the same command."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, CommandConfig) else None


def flags(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the flags of a field, () of a positional argument."""
    arg = argument(field) or Arg()
    if arg.flags is not None:
        return arg.flags
    no = "no-" if field.default is True and not arg.both else ""
    return (f"--{no}{name.replace('_', '-')}",)


def build(config: type[C], options: Mapping[str, Any]) -> C:
    """Build a Config from options by name; those of its parts are among them.

    Raises:
        HeadwiseError: a value is wrong.
    """
    values = dict(options)
    for name, field in config.model_fields.items():
        if (part := nested(field)) is not None:
            own = {
                field_name: values.pop(field_name)
                for field_name in part.model_fields
                if field_name in values
            }
            values[name] = part(**own)
    return config(**values)


def config_by_name(config: type[C], options: Mapping[str, Any], /, **fixed: Any) -> C:
    """Build a Config from Python values by field name.

    Args:
        config: Config class.
        options: values with the types of the fields. A path may be text, and a field with several
            values accepts a single one.
        fixed: fields that the caller of `options` may not set.

    Raises:
        HeadwiseError: an option is unknown, or its value is wrong.
    """
    allowed = [name for name in option_fields(config) if name not in fixed]
    for name in options:
        if name not in allowed:
            raise HeadwiseError(f"unknown option {name!r}; known: {', '.join(allowed)}")
    return build(config, {**options, **fixed})


def option_fields(config: type[CommandConfig]) -> dict[str, FieldInfo]:
    """Return the fields that are options by name, including those of parts."""
    declared: dict[str, FieldInfo] = {}
    for name, field in config.model_fields.items():
        if (part := nested(field)) is not None:
            declared |= option_fields(part)
        elif argument(field) is not None:
            declared[name] = field
    return declared


def _explain(config: type[CommandConfig], error: ValidationError) -> str:
    """Format pydantic's error as one line: the option, the allowed values, and the value."""
    first, *rest = error.errors(include_url=False)
    if isinstance(cause := first.get("ctx", {}).get("error"), HeadwiseError):
        return str(cause)
    name = str(first["loc"][0])
    if (field := config.model_fields.get(name)) is None:
        return f"unknown option {name!r}; known: {', '.join(config.model_fields)}"
    shown = (flags(name, field) or ((argument(field) or Arg()).metavar or name,))[-1]
    if first["type"] == "missing":
        return f"{shown} is required"
    same = [first, *(each for each in rest if each["loc"][0] == name)]
    allowed = dict.fromkeys(_allowed(field, each) for each in same)
    return f"{shown} must be {' or '.join(allowed)}, got {shorten(first['input'])}"


def _allowed(field: FieldInfo, error: Any) -> str:
    """Describe the values that the field of an error allows."""
    if error["type"] == "literal_error":
        choices = value_type(field.annotation)[0]
        return f"one of {', '.join(get_args(choices))}"
    if error["type"] in _WORDS:
        return _WORDS[error["type"]]
    limits: dict[str, list[Any]] = {"ge": [], "le": [], "gt": [], "lt": []}
    for each in _metadata_of(field):
        for bound, values in limits.items():
            if hasattr(each, bound):
                values.append(getattr(each, bound))
    minimum = max(limits["ge"], default=None)
    maximum = min(limits["le"], default=None)
    above = max(limits["gt"], default=None)
    below = min(limits["lt"], default=None)
    if maximum == LARGEST and error["type"] != "less_than_equal":
        maximum = None
    if above is not None and below is not None:
        return f"between {above} and {below}"
    if minimum is not None and maximum is not None:
        return f"from {minimum} to {maximum}"
    words = {"at least": minimum, "above": above, "below": below, "at most": maximum}
    return " and ".join(f"{word} {limit}" for word, limit in words.items() if limit is not None)
