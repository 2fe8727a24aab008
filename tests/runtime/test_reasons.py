"""docs/served.md explains whatever the runtime can refuse or serve densely, in the words of the
source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs/served.md").read_text()
_ROWS = [line.lower() for line in _PAGE.splitlines() if line.startswith("| ")]
# Functions and constants that say why a call is dense, without raising it.
_REASONS = {
    "special",
    "name_of",
    "kernel_of",
    "kernel_for",
    "too_few",
    "_why_dense",
    "_why_not",
    "SLIDES",
    "NOT_OURS",
    "NOT_CAUSAL",
}


def parts_of(node: ast.expr | None) -> list[str]:
    """What of a message is the same whatever happened."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return [
                part
                for value in values
                for part in parts_of(value)
                if isinstance(value, ast.Constant)
            ]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return parts_of(left) + parts_of(right)
        case ast.BoolOp(values=[*_, last]):
            return parts_of(last)
    return []


def messages(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and constant parts of each message in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "HeadwiseError":
            values = [node.args[0]]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in _REASONS:
            values = [node.value]
        elif isinstance(node, ast.FunctionDef) and node.name in _REASONS:
            values = [
                value
                for inner in ast.walk(node)
                if isinstance(inner, ast.Return | ast.Assign)
                for value in getattr(inner.value, "elts", [inner.value])
            ]
        for value in values:
            if parts := [part for part in parts_of(value) if re.search(r"[a-z]{3}", part)]:
                yield value.lineno if value else 0, parts


SOURCES = [
    path
    for path in sorted((_ROOT / "runtime").rglob("*.py"))
    if "vllm" not in path.relative_to(_ROOT).parts
]
FOUND = [
    pytest.param(parts, id=f"{path.stem}-{line}-{max(parts, key=len).strip()[:40]}")
    for path in SOURCES
    for line, parts in messages(path)
]


def test_messages_are_found_where_they_are() -> None:
    assert len(FOUND) > 40


@pytest.mark.parametrize("parts", FOUND)
def test_the_page_has_a_row_for_each(parts: list[str]) -> None:
    # A row has its words up to where it goes into detail.
    said = [re.split(r"[:;(,]", part)[0].strip().lower() for part in parts]
    said = max(said, key=len)
    assert any(said in row for row in _ROWS), f"no row of docs/served.md has {said!r}"
