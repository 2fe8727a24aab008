"""docs/structure.md has a line for every module, and every line has its module."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("artifacts", "kernels", "profiling", "runtime", "search")
# Folders that may hold Python beside the five packages.
OTHERS = {"tests", "notebooks"}


def test_every_module_has_its_line_and_every_line_its_module() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\S+)` \| \S", page, flags=re.MULTILINE)
    found = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    ]
    assert sorted(listed) == sorted(found)


def test_code_lives_in_the_five_packages() -> None:
    hidden = {path for path in ROOT.iterdir() if path.name.startswith(".") or path.name == "build"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path not in hidden and any(path.rglob("*.py"))}
    assert folders <= {*PACKAGES, *OTHERS}
