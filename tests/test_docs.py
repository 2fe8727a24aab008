"""The pages: every link leads somewhere, every page is in the site's navigation, and
code and command lines are ones that work."""

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


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


# Files that `make docs` copies next to the pages of docs/.
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BESIDE = re.findall(r"^\tcp -r (notebooks .+) build/docs$", MAKEFILE, re.MULTILINE)[0].split()


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_every_page_resolve(page):
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        there = (page.parent / unquote(path)).resolve() if path else page
        if not there.exists() or (
            there.suffix == ".md" and anchor and anchor not in anchors(there)
        ):
            wrong.append(link)
    assert not wrong


def test_links_and_anchors_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    code = "```\n# no heading [x](y.md)\n```"
    page.write_text(f"# A `b` heading\n\n[one](none.md) [two](#a-b-heading)\n\n{code}\n")
    assert links(page) == ["none.md", "#a-b-heading"] and anchors(page) == {"a-b-heading"}


def entries(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from entries(value) if isinstance(value, list) else [value]


def test_site_lists_every_page_once():
    listed = list(entries(SITE["nav"]))
    assert len(listed) == len(set(listed))
    places = {name: (ROOT if name.partition("/")[0] in BESIDE else DOCS) / name for name in listed}
    assert [name for name, path in places.items() if not path.is_file()] == []
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents}
    pages.remove(SITE["not_in_nav"])
    pages |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert pages == set(listed) - set(BESIDE)


def test_site_loads_nothing_from_other_hosts():
    assert SITE["theme"]["font"] is False and "search" in SITE["plugins"]
    for drawing in DOCS.glob("drawings/*.svg"):
        assert "http" not in drawing.read_text().replace("http://www.w3.org/2000/svg", "")


CHART = runpy.run_path(str(ROOT / "benchmarks/chart.py"), run_name="chart")


def test_first_token_table_is_made_from_the_result_files():
    rows = CHART["rows"]()
    assert (DOCS / "first_token.md").read_text(encoding="utf-8") == CHART["table"](rows)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert CHART["with_table"](readme, rows) == readme
    assert readme.count("| tokens | model | processor |") == 1
    for name in ("index.md", "results.md"):
        text = (DOCS / name).read_text(encoding="utf-8")
        assert text.count('--8<-- "first_token.md"') == 1


def test_first_token_table_without_markers_is_refused():
    with pytest.raises(ValueError, match="must have the lines <!-- first-token table -->"):
        CHART["with_table"]("# A page", [])


def test_version_is_the_same_everywhere():
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project is not None and cited["version"] == project[1]


def test_results_pages_fit_and_link_their_files():
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 350
    text += (DOCS / "first_token.md").read_text(encoding="utf-8")
    files = list(DOCS.glob("results/*.json"))
    named = set(re.findall(r"\(results/([\w.]+)\)", text))
    assert named == {path.name for path in files}
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 300 for path in files)
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 120


# CHANGELOG.md tells of names that are gone.
WITH_CODE = [page for page in PAGES if page.name != "CHANGELOG.md"]
WITH_CODE += sorted((ROOT / "notebooks").glob("*.ipynb"))
OURS = ("artifacts", "headwise", "kernels", "profiling", "runtime", "search")
page_with_code = pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)


class Block(NamedTuple):
    """Code of a page: its language, "" if not named, and its text."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Blocks of a page, fenced and indented, or the cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return [
            block
            for cell in cells
            for block in (
                [Block("python", "".join(cell["source"]))]
                if cell["cell_type"] == "code"
                else blocks_of("".join(cell["source"]))
            )
        ]
    return blocks_of(text)


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


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("from runtime import load, lode", ["runtime.lode"]),
        ("from artifacts import errors", []),
        ("import profiling.nothing", ["profiling.nothing"]),
        ("headwise.load('a').apply(model)\nheadwise.lode('a')", ["headwise.lode"]),
        ("from runtime import dense as d\nd.fastest(q)\nd.faster(q, k, v)", ["d.fastest"]),
        ("from headwise import load\nload('a', speed=3.0)", ["load(speed=)"]),
        ("search = 1\nsearch.nothing", []),
    ],
)
def test_wrong_names_lists_names_that_do_not_exist(code, wrong):
    tree = parsed(Block("", code))
    assert tree is not None and wrong_names(tree) == wrong


def test_blocks_of_finds_fenced_and_indented_code():
    page = (
        "# A page\n\n    from a import b\n\n    b()\n\n```python\nimport c\n```\n\n- item\n  more\n"
    )
    assert blocks_of(page) == [
        Block("python", "import c\n"),
        Block("", "from a import b\n\nb()\n"),
    ]
    with pytest.raises(SyntaxError):
        parsed(Block("", "from a b import c\n"))
    assert parsed(Block("", "pip install headwise\n")) is None


def test_fault_names_command_lines_that_do_not_parse(capsys):
    block = Block(
        "", "headwise show cfg.yaml \\\n    --json | jq .  # all of it\n$ headwise show --no\n"
    )
    lines = list(commands(block))
    assert lines == [["headwise", "show", "cfg.yaml", "--json"], ["headwise", "show", "--no"]]
    assert fault(lines[0], capsys, whole=True) is None
    assert "error: " in str(fault(lines[1], capsys, whole=True))
    assert fault(["headwise", "gate", "--length", "N"], capsys, whole=False) is None


@page_with_code
def test_python_blocks_of_a_page_compile_and_name_what_exists(page):
    for block in blocks(page):
        tree = parsed(block)
        if tree is not None:
            compile(tree, page.name, "exec")
            assert wrong_names(tree) == []


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


@page_with_code
def test_command_lines_of_a_page_parse(page, capsys):
    faults = [
        fault(words, capsys, whole=True) for block in blocks(page) for words in commands(block)
    ]
    if page.suffix == ".md":
        faults += [fault(words, capsys, whole=False) for words in inline_commands(page)]
    assert [each for each in faults if each] == []


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
