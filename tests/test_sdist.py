"""The source archive is a checkout without its history: tests, docs and notebooks are in it, and
its tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *(
        "artifacts",
        "benchmarks",
        "docs",
        "headwise",
        "kernels",
        "notebooks",
        "profiling",
        "runtime",
    ),
    *("search", "tests"),
)
FILES = (
    *(
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "Makefile",
        "constraints.txt",
        "requirements-vllm.txt",
    ),
    *("requirements-docs.txt", "mkdocs.yml", "CITATION.cff", "SECURITY.md"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)
LEFTOVERS = ("__pycache__", ".ipynb_checkpoints", ".hypothesis", "prebuilt")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive's content."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / "copy" / name, ignore=shutil.ignore_patterns(*LEFTOVERS)
        )
    for name in FILES:
        shutil.copy(ROOT / name, folder / "copy" / name)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "copy", check=True, capture_output=True
    )
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    (found,) = folder.glob("headwise-*/")
    return found


def run_tests(folder: Path, *arguments: str) -> str:
    """Run the archive's own tests in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_nothing_is_missing(unpacked: Path) -> None:
    expected = {Path(name) for name in FILES} | {
        path.relative_to(ROOT)
        for name in FOLDERS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not set(path.relative_to(ROOT).parts) & set(LEFTOVERS)
    }
    assert {path for path in expected if not (unpacked / path).is_file()} == set()


@pytest.mark.slow
def test_some_tests_of_the_archive_pass(unpacked: Path) -> None:
    run_tests(
        unpacked,
        "tests/test_kinds.py",
        "tests/artifacts/test_store.py",
        "tests/kernels/test_index.py",
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_tests_of_the_archive_are_found(unpacked: Path) -> None:
    here = run_tests(ROOT, "--collect-only").splitlines()[-1]
    assert (
        run_tests(unpacked, "--collect-only").splitlines()[-1].split(" in ")[0]
        == here.split(" in ")[0]
    )
