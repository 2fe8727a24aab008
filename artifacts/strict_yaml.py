"""YAML as artifacts use it: JSON's values in YAML's layout, and nothing that makes two readers disagree.

Refused are aliases and anchors (a small file could unfold into a huge one), tags, directives, keys given twice (YAML
readers silently keep the last), several documents in one file, deep nesting, more values than any artifact has, and
plain scalars that YAML 1.1, YAML 1.2 and the readers in use take for different things: `no`, `1:30`, `0x1F`, `1_000`,
`1e5`, `2025-01-31`, `<<`. So whatever reads an artifact reads the values that Headwise reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import yaml

from artifacts.errors import ArtifactError, shorten

MAX_DEPTH = 32
# A value costs about 2 us and 100 bytes, before anyone has looked at what it says. A model of 126 layers of 128 heads
# has 16,000 names in its rows; 80 layers of 64 heads with a pattern for each head come to 36,000 values.
MAX_VALUES = 100_000
MAX_KEYS = 16_384
MAX_LIST = 4_096
MAX_TEXT = 65_536
# Parsing in C is about ten times as fast; PyYAML's wheels have it, some builds from source do not.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# The C library takes a time square in the number of directives, before its first event. YAML knows five line breaks.
_DIRECTIVE = re.compile(
    rb"%(?:(?<=\A%)|(?<=[\n\r]%)|(?<=\xc2\x85%)|(?<=\xe2\x80\xa8%)|(?<=\xe2\x80\xa9%)|(?<=\xef\xbb\xbf%))"
)

_INT = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+][0-9]+)?")
# What some reader takes for a truth value, null, a merge, a number or a time, and another for something else.
_UNCLEAR = re.compile(
    r"""
    y|n|yes|no|on|off|true|false|null | <<|= | [-+]?\.(nan|inf)
    | [-+]?0[xob][0-9a-f_]+
    | [-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9_]+)?
    | [-+]?[0-9][0-9_]*(:[0-9][0-9_]*)+(\.[0-9_]*)?
    | [0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t\ \t].*)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Larger whole numbers are rounded by readers that have only floats.
_LARGEST = 2**53
_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
    ".nan": float("nan"),
    ".inf": float("inf"),
    "-.inf": float("-inf"),
}
# What needs no quotes, whatever stands around it.
_PLAIN = re.compile(r"(?!\.\.\.)[A-Za-z0-9_./+=()~^$;]([A-Za-z0-9_./+=()~^$;@%-]| (?! |$))*")
_NO_KEY = object()
_STARTS = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_ENDS = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


def parse(text: str | bytes) -> Any:
    """The one document in `text` (bytes are UTF-8) as dicts, lists, strings, numbers, booleans and None.

    Raises:
        ArtifactError: no YAML, or YAML that is refused; the message has the line.
    """
    data = text.encode() if isinstance(text, str) else text
    if directive := _DIRECTIVE.search(data):
        line = data.count(b"\n", 0, directive.end()) + 1
        raise ArtifactError(f"line {line}: a line that starts with % is not allowed: remove the directive")
    try:
        return _build(data)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ArtifactError(f"{where}not valid YAML, {problem} (is the file cut short?)") from None


def _build(data: bytes) -> Any:
    # What a plain scalar means: the same names and sizes come again and again.
    known = dict(_WORDS)
    root: list[Any] = []
    # The containers around the current one, innermost last; each with the key that waits for its value.
    around: list[tuple[Any, Any]] = []
    container: Any = root
    key: Any = _NO_KEY
    values = 0
    next_event = _Loader(data).get_event
    while (event := next_event()) is not None:
        kind = type(event)
        value: Any
        if kind is yaml.ScalarEvent:
            if event.anchor is not None or event.tag is not None:
                _refuse_marks(event)
            text = event.value
            if key is _NO_KEY and type(container) is dict:
                if text in container or len(text) > MAX_TEXT or not (event.style or is_text(text)):
                    _refuse(event, _wrong_key(text, text in container))
                key = text
                continue
            value = text if event.style else known.get(text, _NO_KEY)
            if value is _NO_KEY:
                value = known[text] = _plain(event)
            if len(text) > MAX_TEXT:
                _refuse(event, _too_long(text))
        elif kind in _STARTS:
            _refuse_marks(event)
            if key is _NO_KEY and type(container) is dict:
                _refuse(event, "a key must be plain text")
            value = {} if kind is yaml.MappingStartEvent else []
        elif kind in _ENDS:
            if len(container) > (MAX_KEYS if type(container) is dict else MAX_LIST):
                _refuse(event, _too_many(container))
            container, key = around.pop()
            continue
        else:
            _refuse_other(event, root)
            continue
        values += 1
        if values > MAX_VALUES:
            _refuse(event, f"more than {MAX_VALUES} values, too many for an artifact")
        if type(container) is dict:
            container[key] = value
            key = _NO_KEY
        else:
            container.append(value)
        if kind is not yaml.ScalarEvent:
            around.append((container, key))
            if len(around) > MAX_DEPTH:
                _refuse(event, f"nested more than {MAX_DEPTH} deep")
            container, key = value, _NO_KEY
    if not root:
        raise ArtifactError("the file is empty")
    return root[0]


def is_text(plain: str) -> bool:
    """Whether every reader takes a plain scalar, one without quotes, for text."""
    return plain not in _WORDS and not _UNCLEAR.fullmatch(plain)


def _plain(event: Any) -> Any:
    text = event.value
    if _INT.fullmatch(text):
        if len(text) > 17 or abs(int(text)) > _LARGEST:
            _refuse(event, f"{shorten(text)} is beyond 2^53, and readers round it: a text needs quotes")
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _UNCLEAR.fullmatch(text):
        _refuse(event, f"readers disagree about {shorten(text)}: quote a text; numbers are written 12, 0.5 or 1.0e-05")
    return text


def _wrong_key(text: str, twice: bool) -> str:
    if len(text) > MAX_TEXT:
        return _too_long(text)
    return f"the key {shorten(text)} is given twice: remove one" if twice else f"the key {shorten(text)} needs quotes"


def _too_long(text: str) -> str:
    return f"a text of {len(text)} characters, an artifact's have at most {MAX_TEXT}"


def _too_many(container: Any) -> str:
    kind, most = ("mapping", MAX_KEYS) if isinstance(container, dict) else ("list", MAX_LIST)
    return f"a {kind} of {len(container)} entries ends here, an artifact's have at most {most}"


def _refuse_other(event: Any, root: list[Any]) -> None:
    if isinstance(event, yaml.AliasEvent):
        _refuse(event, f"alias *{event.anchor} is not allowed: write the value out")
    if isinstance(event, yaml.DocumentStartEvent) and root:
        _refuse(event, "a second document starts here: an artifact is one document")


def _refuse_marks(event: Any) -> None:
    if event.anchor is not None:
        _refuse(event, f"anchor &{event.anchor} is not allowed: write the value out where it is used")
    if event.tag is not None:
        _refuse(event, f"tag {shorten(event.tag)} is not allowed: remove it")


def _refuse(event: Any, why: str) -> None:
    raise ArtifactError(f"line {event.start_mark.line + 1}: {why}")


def dump(fields: Mapping[str, Any]) -> str:
    """YAML for JSON data, keys in the given order; mappings and lists of scalars alone take one line each.

    Raises:
        ArtifactError: nested deeper than can be read.
    """
    return "".join(f"{line}\n" for line in _lines(fields, 1))


def _lines(value: Any, depth: int) -> Iterator[str]:
    """A container in block style, line by line; what it holds is in flow style where it holds scalars alone."""
    if depth > MAX_DEPTH:
        raise ArtifactError(f"nested more than {MAX_DEPTH} deep")
    if not value:
        yield "{}" if isinstance(value, Mapping) else "[]"
        return
    for key, entry in value.items() if isinstance(value, Mapping) else ((None, each) for each in value):
        lead = "-" if key is None else f"{_quoted(key)}:"
        simple = _flow(entry)
        if simple is not None:
            yield f"{lead} {simple}"
            continue
        below = _lines(entry, depth + 1)
        if key is None:
            yield f"- {next(below)}"
        else:
            yield lead
        indent = "  " if key is None or isinstance(entry, Mapping) else ""
        yield from (f"{indent}{line}" for line in below)


def _flow(value: Any) -> str | None:
    """A scalar, or a container of nothing but scalars, on one line; None for any other."""
    if not isinstance(value, Mapping | list | tuple):
        return _scalar(value)
    entries = value.values() if isinstance(value, Mapping) else value
    if any(isinstance(entry, Mapping | list | tuple) for entry in entries):
        return None
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)}: {_scalar(entry)}" for key, entry in value.items()) + "}"
    return "[" + ", ".join(map(_scalar, value)) + "]"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float) and isfinite(value):
        # YAML 1.1 knows no 1e-05.
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}{'' if '.' in mantissa else '.0'}{e}{exponent}"
    return json.dumps(value)


def _quoted(text: str) -> str:
    """Text as it is where every reader takes it for text, in any style and place; quoted where not."""
    if _PLAIN.fullmatch(text) and is_text(text):
        return text
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else _escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\{character}" if character in '"\\' else f"\\u{code:04X}" if code < 2**16 else f"\\U{code:08X}"
