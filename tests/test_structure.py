"""docs/structure.md has a line for every folder of code, in the words of the folder's own
docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("artifacts", "headwise", "kernels", "profiling", "runtime", "search")
# Other folders that may hold Python, the last two generated.
OTHERS = {"benchmarks", "tests", "notebooks", "build", "mutants"}


def _docstring(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def test_structure_page_equals_the_docstrings():
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\S+)/` \| (.+) \|$", page, flags=re.MULTILINE))
    inits = [path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    assert listed == {path.parent.relative_to(ROOT).as_posix(): _docstring(path) for path in inits}


def test_code_is_in_known_folders():
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and any(path.rglob("*.py"))
    }
    assert folders <= {*PACKAGES, *OTHERS}
