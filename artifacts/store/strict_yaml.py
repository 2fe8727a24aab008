"""YAML as artifacts use it: JSON's values in YAML's layout, read and written by PyYAML.

The parser rejects aliases (a small file could expand into a huge one), tags, duplicate keys, more
values than an artifact has, and plain scalars that YAML 1.1 and 1.2 interpret differently: `no`,
`1:30`, `0x1F`, `1e5`, `2025-01-31`, `<<`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

import yaml

from artifacts.errors import ArtifactError, shorten

MAX_DEPTH = 32
MAX_VALUES = 100_000  # with keys; 80 layers of 64 heads with one pattern per head need 67,000
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"-?(0|[1-9][0-9]{0,15})")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+][0-9]+)?")
# Text in PyYAML, but a number or a boolean in YAML 1.2 or in another reader.
_UNCLEAR = re.compile(
    r"([yn]|[-+]?(\.nan|\.inf|0[xob][0-9a-f_]+|(\.\d+|\d+(\.[0-9_]*)?)(e[-+]?\d+)?))$", re.I
)


class _Loader(yaml.CSafeLoader):
    """Loader that resolves a plain scalar to text only if every reader does."""


class _Dumper(yaml.CSafeDumper):
    """Dumper that quotes scalars that the loader does not read as text, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:float", _UNCLEAR, list("yYnN-+.0123456789"))


def parse(text: str | bytes) -> Any:
    """Parse the single document in `text` (UTF-8) to plain Python data.

    Raises:
        ArtifactError: the text is not YAML, or is rejected; the message has the line.
    """
    if isinstance(text, str):
        data = text.encode()
    else:
        data = text
    # The C library takes quadratic time in their number, before its first event.
    if data.count(b"%TAG") > 99:
        raise ArtifactError("directives (%TAG) are not allowed: remove them")
    try:
        return _document(_Loader(data))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark:
            where = f"line {mark.line + 1}: "
        else:
            where = ""
        why = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise ArtifactError(f"{where}not valid YAML, {why} (is the file cut short?)") from None


def dump(fields: Any) -> str:
    """Format JSON data as YAML; mappings and lists with only scalars take one line each."""
    layout: dict[str, Any] = {"default_flow_style": None, "sort_keys": False, "width": 2**31 - 1}
    return str(yaml.dump(fields, Dumper=_Dumper, allow_unicode=True, **layout))


def _document(loader: _Loader) -> Any:
    """Return the value of the single document in the stream."""
    events = _events(loader)
    first = next(events)
    if isinstance(first, yaml.StreamEndEvent):
        raise ArtifactError("the file is empty")
    value = _value(next(events), events, loader)
    next(events)
    after = next(events)
    if not isinstance(after, yaml.StreamEndEvent):
        _refuse(after, "not valid YAML, but found another document (is the file cut short?)")
    return value


def _events(loader: _Loader) -> Iterator[Any]:
    """Yield the events after the start of the stream, and reject forbidden ones."""
    depth = values = 0
    loader.get_event()
    while loader.check_event():
        event = loader.get_event()
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            if event.anchor is not None or getattr(event, "tag", None) is not None:
                _refuse(event, "anchors, aliases and tags are not allowed: write the value out")
            values += 1
            depth += isinstance(event, yaml.CollectionStartEvent)
            if values > MAX_VALUES or depth > MAX_DEPTH:
                _refuse(
                    event, f"more than {MAX_VALUES} values, or nested more than {MAX_DEPTH} deep"
                )
        yield event


def _value(event: Any, events: Iterator[Any], loader: _Loader) -> Any:
    """Build the value that starts with `event`, and consume its events."""
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(entry := next(events), yaml.SequenceEndEvent):
            items.append(_value(entry, events, loader))
        return items
    if isinstance(event, yaml.MappingStartEvent):
        fields: dict[str, Any] = {}
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent) or not _is_text(key, loader):
                _refuse(key, "a key must be text, with quotes where it reads as something else")
            if key.value in fields:
                _refuse(key, f"the key {shorten(key.value)} appears twice: remove one")
            fields[key.value] = _value(next(events), events, loader)
        return fields
    return _scalar(event, loader)


def _is_text(event: yaml.ScalarEvent, loader: _Loader) -> bool:
    tag = loader.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call]
    return str(tag).endswith(":str")


def _scalar(event: yaml.ScalarEvent, loader: _Loader) -> Any:
    text = event.value
    if _is_text(event, loader):
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _FLOAT.fullmatch(text):
        return float(text)
    # Readers with only floats round larger whole numbers.
    if _INT.fullmatch(text) and abs(int(text)) <= 2**53:
        return int(text)
    _refuse(
        event, f"readers disagree about {shorten(text)}: quote a text, write numbers like 1.0e-05"
    )


def _refuse(at: Any, why: str) -> NoReturn:
    raise ArtifactError(f"line {at.start_mark.line + 1}: {why}")
