"""Windows of texts, the user's or Python's own reference."""

from __future__ import annotations

import ast
import functools
import gc
import sysconfig
from itertools import chain
from pathlib import Path

from artifacts import HeadwiseError
from profiling.prompts.kind import Prompt, Request, task
from profiling.prompts.text_files import cells, read_ids
from profiling.prompts.tokens import Ids

# Folders of the standard library whose docstrings are prose, and the minimum length of a docstring
# in characters.
_LIBRARY: tuple[str, ...] = (
    ".",
    "asyncio",
    "collections",
    "concurrent/futures",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
)
_LIBRARY += ("multiprocessing", "unittest", "urllib", "xml/dom", "xml/sax")
_LEAST = 80
# Where statements have others, in the order of their fields.
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


@task(
    "text",
    takes_file="must",
    asks="nothing: windows of your text",
    scored="perplexity",
    source="your file",
)
def windows(request: Request) -> list[Prompt]:
    """Cut disjoint windows, in random order."""
    return _stretches(request, read_ids(request.encode, request.file), request.file.name)


def _stretches(request: Request, ids: Ids, name: str) -> list[Prompt]:
    length = request.length
    room = length - len(request.encode.prefix)
    if room < 1:
        raise HeadwiseError(f"length {length} is too small: the tokenizer's own start fills it")
    if len(ids) < room:
        raise HeadwiseError(
            f"{name} is too short: it has {len(ids)} tokens, a prompt of {length} needs {room}"
        )
    prompts = []
    for start, end in cells(request, len(ids))[: request.samples]:
        own, spans = request.assemble((), [ids[start:end]])
        prompts.append(Prompt(own, None, text_spans=tuple(spans), cell=(start, end)))
    return prompts


@task(
    "prose",
    has_text=True,
    asks="nothing: windows of Python's own documentation",
    scored="perplexity",
    source="Python's help() and docstrings",
)
def prose(request: Request) -> list[Prompt]:
    """Stretches of the documentation that every Python carries: English of a technical kind.

    First the language reference of help(), then the docstrings of the standard library. Other
    Python versions have other words in places.
    """
    return _stretches(request, request.encode.whole(pythons_own), "Python's own documentation")


@functools.cache
def pythons_own() -> str:
    """Join help()'s topics and the standard library's docstrings, both by name."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for part in _LIBRARY for file in (library / part).glob("*.py"))
    collects = gc.isenabled()
    # Trees have a million nodes and no cycles; looking for some takes three times as long as
    # parsing.
    gc.disable()
    try:
        docstrings = list(chain.from_iterable(map(_docstrings, files)))
    finally:
        if collects:
            gc.enable()
    return "\n\n".join([*(topics[name] for name in sorted(topics)), *docstrings])


def _docstrings(file: Path) -> list[str]:
    """Docstrings of a module, its classes and functions, of more than a line or two."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        ast.get_docstring(node) or "" for node in _statements(tree) if isinstance(node, documented)
    ]
    return [text for text in docstrings if len(text) >= _LEAST]


def _statements(tree: ast.Module) -> list[ast.AST]:
    """Walk a module's statements in the order of ast.walk, without expressions."""
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        # The growing list is the queue.
        for name in _BLOCKS:
            nodes += getattr(node, name, ())
    return nodes
