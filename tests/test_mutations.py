"""Modules broken by hand, as tests/mutations.txt has them: the tests named there must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("artifacts", "headwise", "kernels", "profiling", "runtime", "search", "docs", "tests")


def read_cases() -> list[tuple[str, str, str, str]]:
    """The module, its text, the broken text and the tests that must notice, of mutations.txt."""
    found = []
    file = tests = text = ""
    for line in (ROOT / "tests" / "mutations.txt").read_text().splitlines():
        content = line[2:].replace("\\n", "\n")
        if line.startswith("-"):
            text = content
        elif line.startswith("+"):
            found.append((file, text, content, tests))
        elif not line.startswith("#"):
            file, _, tests = line.partition(": ")
    return found


CASES = read_cases()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("file", "text", "broken", "tests"),
    CASES,
    ids=[f"{number} {file}" for number, (file, *_) in enumerate(CASES)],
)
def test_a_broken_module_is_noticed(tmp_path, file, text, broken, tests):
    for folder in FOLDERS:
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module = tmp_path / file
    whole = module.read_text()
    assert text in whole, f"{file} no longer has {text!r}: break another line"
    module.write_text(whole.replace(text, broken, 1))
    named = [str(tmp_path / "tests" / name) for name in tests.split()]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, *named],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    # 1: tests ran, and some failed.
    assert ran.returncode == 1, ran.stdout[-3000:] + ran.stderr[-1000:]
