"""Docstrings are in Google's style: one field a line, under names that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("artifacts", "benchmarks", "headwise", "kernels", "profiling", "runtime", "search")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NAMES = r"\*{0,2}\w+(?:, \*{0,2}\w+)*"


def names_of(node: Documented) -> set[str]:
    """The parameters of a function; the fields, attributes and parameters of a class."""
    names = set()
    if isinstance(node, ast.ClassDef):
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                names.add(part.attr)
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                names.add(part.target.id)
            elif isinstance(part, ast.FunctionDef):
                names.add(part.name)
                if part.name == "__init__":
                    names |= names_of(part)
        return names
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [each for each in (arguments.vararg, arguments.kwarg) if each]
    return {each.arg for each in every}


def merged(text: str, names: set[str]) -> list[str]:
    """Fields in running text: names that are followed by a colon, after a sentence or a clause."""
    result = re.findall(rf"(?:^|(?<=[.;] ))({NAMES}): ", " ".join(text.split()))
    return [each for each in result if names.issuperset(re.findall(r"\w+", each))]


def sections(doc: str) -> Iterator[tuple[str, list[str]]]:
    """The text of a docstring before its sections, under no name, and each section's lines."""
    name, lines = "", list[str]()
    for line in doc.split("\n"):
        heading = re.fullmatch(r"(\w+):", line)
        if heading and heading[1] in SECTIONS:
            yield name, lines
            name, lines = heading[1], []
        else:
            lines.append(line)
    yield name, [line for line in lines if line]


def faults(doc: str, names: set[str]) -> list[str]:
    """What is wrong in a docstring, a line each."""
    wrong = []
    for section, lines in sections(doc):
        if not section:
            paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
            wrong += [f"{name} is in running text" for p in paragraphs for name in merged(p, names)]
            continue
        if section in ("Returns", "Yields"):
            continue
        for line in filter(None, lines):
            entry = re.match(rf"    ({NAMES})(?: \([^)]*\))?:(?: |$)(.*)", line)
            if entry is None:
                if not re.match(" {8}\\S", line):
                    wrong.append(f"{section}: neither a field nor indented by 8: {line.strip()}")
            elif section != "Raises":
                unknown = set(re.findall(r"\w+", entry[1])) - names
                wrong += [f"{section}: there is no {name}" for name in sorted(unknown)]
                wrong += [f"{name} has no line of its own" for name in merged(entry[2], names)]
    return wrong


def test_docstrings_have_one_field_a_line_and_name_what_exists():
    assert faults("Add.\n\nArgs:\n    c: one. a: other.", {"a"}) == [
        "Args: there is no c",
        "a has no line of its own",
    ]
    wrong = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Documented) and (doc := ast.get_docstring(node)):
                place = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                wrong += [f"{place}: {fault}" for fault in faults(doc, names_of(node))]
    assert wrong == []
