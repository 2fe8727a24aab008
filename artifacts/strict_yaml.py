"""YAML as artifacts use it: JSON's values in YAML's layout, and nothing that makes two readers disagree.

Refused are aliases and anchors (a small file could unfold into a huge one), tags, directives, keys given twice (YAML
readers silently keep the last), several documents in one file, deep nesting and more values than any artifact has.
Plain scalars follow YAML 1.2's JSON schema, so `no` and 2025-01-31 are text and 1e-5 is a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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

# A number that takes more is no number that a schema wants.
_LONGEST_NUMBER = 400
# The C library takes a time square in the number of directives, before its first event. YAML knows five line breaks.
_DIRECTIVE = re.compile(
    rb"%(?:(?<=\A%)|(?<=[\n\r]%)|(?<=\xc2\x85%)|(?<=\xe2\x80\xa8%)|(?<=\xe2\x80\xa9%)|(?<=\xef\xbb\xbf%))"
)

_INT = re.compile(r"-?(0|[1-9][0-9]{0,39})")
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
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
                if text in container or len(text) > MAX_TEXT:
                    _refuse(event, _wrong_key(text))
                key = text
                continue
            value = text if event.style else known.get(text, _NO_KEY)
            if value is _NO_KEY:
                value = known[text] = _plain(text)
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


def _plain(text: str) -> Any:
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _wrong_key(text: str) -> str:
    return _too_long(text) if len(text) > MAX_TEXT else f"the key {shorten(text)} is given twice: remove one"


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


class _Dumper(yaml.SafeDumper):
    """Quotes also what only YAML 1.2 reads as a number, such as 1e5, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # In the other styles YAML folds line breaks, among them three that Python does not write as such.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-0123456789"))


def dump(fields: Mapping[str, Any]) -> str:
    """YAML for JSON data, keys in the given order; mappings and lists of scalars alone take one line each."""
    text: str = yaml.dump(
        dict(fields),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
        default_flow_style=None,
    )
    return text
