"""The pages: code and command lines are ones that work, and what `make docs` does not see: links of
README.md."""

from __future__ import annotations

import ast
import inspect
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
import yaml

from artifacts.cli.parser import ArgumentParser
from headwise.__main__ import VERBS, parser_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("results/*.md")])


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Where a page's links and pictures lead."""
    return re.findall(r"!?\[[^\]]*\]\(\s*([^()\s]+)\s*\)", text_of(page))


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by, as GitHub and Python-Markdown make it."""
    result = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        result.add(re.sub(r"\s+", "-", words))
    return result


def test_links_of_the_readme_resolve():
    page = ROOT / "README.md"
    wrong = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", name):
            continue
        there = ROOT / unquote(name) if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    assert wrong == [] and links(page)


def test_site_loads_nothing_from_other_hosts():
    assert re.search(r"^  font: false$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    for drawing in DOCS.glob("drawings/*.svg"):
        assert "http" not in drawing.read_text().replace("http://www.w3.org/2000/svg", "")


def test_version_is_the_same_everywhere():
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project is not None and cited["version"] == project[1]


# CHANGELOG.md tells of names that are gone.
WITH_CODE = [page for page in PAGES if page.name != "CHANGELOG.md"]
WITH_CODE += sorted((ROOT / "notebooks").glob("*.ipynb"))
OURS = ("artifacts", "headwise", "kernels", "profiling", "runtime", "search")


class Block(NamedTuple):
    """Code of a page: its language, "" if not named, and its text."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Blocks of a page, fenced and indented, or the cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return blocks_of(text)
    result = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        result += [Block("python", source)] if cell["cell_type"] == "code" else blocks_of(source)
    return result


def blocks_of(text: str) -> list[Block]:
    """Blocks of Markdown: fenced ones, and runs of indented lines behind an empty one."""
    fenced = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    result = [Block(language, dedented(body)) for _, language, body in fenced.findall(text)]
    rest = fenced.sub("", text)
    indented = re.findall(r"(?:\A|\n\n)((?: {4}.*\n?|\n(?= {4}))+)", rest)
    return result + [Block("", dedented(body)) for body in indented]


def dedented(text: str) -> str:
    return inspect.cleandoc(f"\n{text}") + "\n"


def looks_like_python(text: str) -> bool:
    """True for a text that a reader would take for Python."""
    statement = r"^\s*(?:import \w|from .+ import |(?:with|for|if|def|class) .+:$|print\()"
    return re.search(statement, text, re.MULTILINE) is not None


def parsed(block: Block) -> ast.Module | None:
    """Syntax of a block of Python, None for a block of something else."""
    if block.language not in ("", "python"):
        return None
    try:
        return ast.parse(block.text)
    except SyntaxError:
        if block.language or looks_like_python(block.text):
            raise
        return None


def wrong_names(tree: ast.Module) -> list[str]:
    """Names of ours that a block imports or uses and that do not exist, and wrong keywords."""
    wrong = []
    # Values of the names of the block.
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                if top in OURS and find_spec(alias.name) is None:
                    wrong.append(alias.name)
                elif top in OURS:
                    module = import_module(alias.name)
                    names[alias.asname or top] = module if alias.asname else import_module(top)
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            module = import_module(str(node.module))
            for alias in node.names:
                value = member(module, alias.name)
                names[alias.asname or alias.name] = value
                wrong += [f"{node.module}.{alias.name}"] if value is None else []
    stored = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    # A block may use the imports of an earlier one.
    names |= {name: import_module(name) for name in OURS if name not in stored | set(names)}

    def value_of(node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            module = value_of(node.value)
            if isinstance(module, ModuleType):
                value = member(module, node.attr)
                wrong.extend([ast.unparse(node)] if value is None else [])
                return value
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value_of(node)
        elif isinstance(node, ast.Call) and callable(function := value_of(node.func)):
            parameters = inspect.signature(function).parameters
            if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                keywords = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
                wrong += [
                    f"{ast.unparse(node.func)}({k}=)" for k in keywords if k not in parameters
                ]
    return sorted(set(wrong))


def member(module: Any, name: str) -> Any:
    """Attribute or submodule of a module; None if there is none."""
    is_package = hasattr(module, "__path__")
    if is_package and not hasattr(module, name) and find_spec(f"{module.__name__}.{name}"):
        import_module(f"{module.__name__}.{name}")
    return getattr(module, name, None)


def test_python_blocks_compile_and_name_what_exists():
    wrong = []
    checked = 0
    for page in WITH_CODE:
        for block in blocks(page):
            tree = parsed(block)
            if tree is not None:
                checked += 1
                compile(tree, page.name, "exec")
                wrong += [f"{page.name}: {name}" for name in wrong_names(tree)]
    assert wrong == [] and checked > 30


def commands(block: Block) -> Iterator[list[str]]:
    """Words of each command line of ours in a block."""
    lines = iter(re.sub(r"\s*\\\n\s*", " ", block.text).splitlines())
    for line in lines:
        # An option's help, folded.
        if line.startswith(" " * 12):
            continue
        line = line.strip().removeprefix("$ ").removeprefix("!")
        # A help text begins with "headwise VERB: what it does".
        if not re.match(r"(?:headwise|python|torchrun|\S+/python) (?![\w-]+: )", line):
            continue
        # Two spaces separate a command from its comment.
        line = re.split(r"\s{2,}", line)[0]
        while (words := words_of(line)) is None:
            line = f"{line} {next(lines).strip()}"
        yield words


def words_of(line: str) -> list[str] | None:
    """Words of the first command of a line; None if a quotation continues on the next line."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    ends = [number for number, word in enumerate(words) if word in ("|", "&&", ">")]
    return words[: ends[0]] if ends else words


def inline_commands(page: Path) -> Iterator[list[str]]:
    """Words of each command of ours in a page's prose."""
    for line in re.findall(r"`((?:headwise|python -m|torchrun) [^`]+)`", text_of(page)):
        yield shlex.split(line, comments=True)


def parser_of_words(words: list[str]) -> tuple[ArgumentParser, list[str]] | None:
    """Parser of a command line and the words that it parses; None for another program's."""
    if words[0] == "headwise":
        verb = words[1]
        assert verb in VERBS, f"no command {verb}"
        if verb == "lm-eval":
            # Its arguments are the harness's.
            return None
        return parser_of(verb), words[2:]
    if "-m" in words:
        at = words.index("-m")
        name = words[at + 1]
        if name == "headwise":
            return parser_of(words[at + 2]), words[at + 3 :]
        if name.partition(".")[0] not in OURS:
            return None
        of_module = {module: verb for verb, module in VERBS.items()}
        if name in of_module:
            return parser_of(of_module[name]), words[at + 2 :]
        return import_module(name).parser(), words[at + 2 :]
    script = ROOT / words[1]
    assert script.is_file(), f"no script {words[1]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(script.parent)
        makes = runpy.run_path(str(script), run_name="script").get("parser")
    return (makes(), words[2:]) if makes else None


# Values of placeholders in the pages.
PLACEHOLDERS = {"N": "4096", "X": "0.5", "H": "1", "B": "1"}


def fault(words: list[str], capsys: pytest.CaptureFixture[str], *, whole: bool) -> str | None:
    """Message of a command line's parser, None where it parses.

    whole: False for a command in prose, which may leave required arguments out.
    """
    if not whole:
        words = [PLACEHOLDERS.get(word, word) for word in words if word not in ("...", "[options]")]
        if words[1:2] in ([], ["VERB"]):
            return None
    result = parser_of_words(words)
    if result is None:
        return None
    parser, arguments = result
    if not whole:
        for action in parser._actions:
            action.required = False
            if not action.option_strings and action.nargs is None:
                action.nargs = "?"
        for group in parser._mutually_exclusive_groups:
            group.required = False
    try:
        parser.parse_args(arguments)
    except SystemExit as ended:
        if ended.code:
            return f"{shlex.join(words)}: {capsys.readouterr().err}"
    return None


def test_command_lines_parse(capsys):
    faults = []
    for page in WITH_CODE:
        for block in blocks(page):
            faults += [fault(words, capsys, whole=True) for words in commands(block)]
        if page.suffix == ".md":
            faults += [fault(words, capsys, whole=False) for words in inline_commands(page)]
    assert [each for each in faults if each] == [] and len(faults) > 100


def field_paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Path of each field of an artifact, a pattern by its kind; counts by kind are no fields."""
    if isinstance(value, list):
        for each in value:
            yield from field_paths(each, path)
    elif isinstance(value, dict):
        for name, each in value.items():
            if path == ("patterns",):
                name = each["kind"]
            yield (*path, name)
            if name != "winners":
                yield from field_paths(each, (*path, name))


def test_artifact_example_has_the_fields_of_the_schema():
    block = next(block for block in blocks(DOCS / "artifact.md") if block.language == "yaml")
    golden = yaml.safe_load((ROOT / "tests/artifacts/golden/v1.yaml").read_text(encoding="utf-8"))
    example = yaml.safe_load(block.text)
    assert set(field_paths(example)) <= set(field_paths(golden))
    # Parts of no use for a reader of the example.
    assert set(golden) == set(example)
    names = {name for row in example["prefill"]["layers"] for name in row}
    assert names == set(example["patterns"])
    assert {len(row) for row in example["prefill"]["layers"]} == {example["model"]["num_heads"]}
