"""YAML as artifacts use it: JSON's values in YAML's layout, and nothing that makes two readers disagree.

Refused are aliases and anchors (a small file could unfold into a huge one), tags, keys given twice (YAML
readers silently keep the last), several documents in one file and deep nesting. Plain scalars follow YAML
1.2's JSON schema, so `no` and 2025-01-31 are text and 1e-5 is a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from artifacts.errors import ArtifactError, shorten

MAX_DEPTH = 32
# Parsing in C is about ten times as fast; PyYAML's wheels have it, some builds from source do not.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

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


def parse(text: str) -> Any:
    """The one document in `text` as dicts, lists, strings, numbers, booleans and None.

    Raises:
        ArtifactError: no YAML, or YAML that is refused; the message has the line.
    """
    try:
        return _build(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ArtifactError(f"{where}not valid YAML, {problem} (is the file cut short?)") from None


def _build(text: str) -> Any:
    root: list[Any] = []
    # Open containers, innermost last, each with the key that waits for its value.
    stack: list[tuple[Any, Any]] = [(root, _NO_KEY)]
    for event in yaml.parse(text, Loader=_Loader):
        match event:
            case yaml.ScalarEvent() | yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                _refuse_marks(event)
            case yaml.AliasEvent():
                _refuse(event, f"alias *{event.anchor} is not allowed: write the value out")
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                stack.pop()
                continue
            case yaml.DocumentStartEvent():
                if root:
                    _refuse(event, "a second document starts here: an artifact is one document")
                continue
            case _:
                continue
        container, key = stack[-1]
        if isinstance(container, dict) and key is _NO_KEY:
            stack[-1] = (container, _key(event, container))
            continue
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event)
        else:
            value = {} if isinstance(event, yaml.MappingStartEvent) else []
        if isinstance(container, dict):
            container[key] = value
            stack[-1] = (container, _NO_KEY)
        else:
            container.append(value)
        if not isinstance(event, yaml.ScalarEvent):
            if len(stack) > MAX_DEPTH:
                _refuse(event, f"nested more than {MAX_DEPTH} deep")
            stack.append((value, _NO_KEY))
    if not root:
        raise ArtifactError("the file is empty")
    return root[0]


def _key(event: Any, mapping: dict[str, Any]) -> str:
    if not isinstance(event, yaml.ScalarEvent):
        _refuse(event, "a key must be plain text")
    key = str(event.value)
    if key in mapping:
        _refuse(event, f"the key {shorten(key)} is given twice: remove one")
    return key


def _scalar(event: yaml.ScalarEvent) -> Any:
    text = event.value
    if event.style:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


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
