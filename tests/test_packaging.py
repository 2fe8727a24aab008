"""Wheel and source archive, and our `kernels` next to Hugging Face's package of that name.

Both work from a checkout, installed and editable, with their package and without it. "Installed" is
a folder of links to the packages of this environment, in a process that sees nothing else.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_paths()["purelib"])
PACKAGES = ("artifacts", "headwise", "kernels", "profiling", "runtime", "search")
FOLDERS = (*PACKAGES, "benchmarks", "docs", "examples", "notebooks", "tests")
FILES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "constraints.txt", "mkdocs.yml"),
    *("requirements-vllm.txt", "requirements-docs.txt", "CITATION.cff", "SECURITY.md"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)
LEFTOVERS = ("__pycache__", ".ipynb_checkpoints", ".hypothesis", "prebuilt")

needs_theirs = pytest.mark.skipif(
    not any(d.name == "kernels" for d in importlib.metadata.distributions(path=[str(SITE)])),
    reason="Hugging Face's kernels is not installed: pip install kernels",
)

OURS = """
import transformers, kernels.index, kernels.attention, headwise
from transformers.utils.import_utils import is_kernels_available
from transformers import LlamaForCausalLM
kernels.index.SparseIndex
"""
WITH_THEIRS = f"""{OURS}
from kernels import get_kernel
import kernels.layer, importlib.metadata, importlib.util
assert kernels.__version__ == importlib.metadata.version("kernels")
assert kernels.get_kernel is get_kernel and get_kernel.__module__ == "kernels.load"
assert is_kernels_available("0.0.1", "99") and set(kernels.__all__) <= set(dir(kernels))
assert importlib.util.find_spec("kernels.hf_hub")
"""
WITHOUT_THEIRS = f"""{OURS}
assert not hasattr(kernels, "__version__") and not hasattr(kernels, "get_kernel")
assert not is_kernels_available()
"""


def farm(folder: Path, *, theirs: bool) -> Path:
    """Links to all that is installed but Headwise itself and, unless asked for, their package."""
    folder.mkdir()
    for entry in SITE.iterdir():
        name = entry.name.lower()
        mine = "headwise" in name or name in PACKAGES or name.endswith((".pth", ".egg-link"))
        if name.partition("-")[0] == "kernels" and theirs:
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns(*LEFTOVERS))
        elif not mine and name.partition("-")[0] != "kernels":
            (folder / entry.name).symlink_to(entry)
    return folder


def run(code: str, *path: Path, cwd: Path) -> str:
    """Run code in a process with nothing but these folders and the standard library on its path."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=cwd, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def build(sources: Path, hook: str, target: Path) -> Path:
    """The archive that a build hook of setuptools makes."""
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    target.mkdir()
    subprocess.run(
        [sys.executable, "-c", code, target], cwd=sources, check=True, capture_output=True
    )
    (archive,) = target.iterdir()
    return archive


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy to build in: setuptools leaves folders there."""
    copy = tmp_path_factory.mktemp("sources")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(*LEFTOVERS))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    return build(sources, "build_wheel", tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def unpacked(sources, tmp_path_factory):
    """The source archive's content."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.unpack_archive(build(sources, "build_sdist", folder / "dist"), folder, filter="data")
    (content,) = folder.glob("headwise-*/")
    return content


@needs_theirs
def test_kernels_of_a_checkout_merges_with_hugging_faces():
    """The tests themselves run from a checkout."""
    exec(WITH_THEIRS, {})


@needs_theirs
def test_kernels_of_two_checkouts_merge(tmp_path, sources):
    site = farm(tmp_path / "site", theirs=True)
    code = "import kernels; print(len(kernels.__path__), kernels.get_kernel.__name__)"
    assert run(code, ROOT, sources, ROOT, site, cwd=tmp_path) == "2 get_kernel"


@pytest.mark.slow
def test_wheel_contains_all_but_the_overlay(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = ("*.py", *project["tool"]["setuptools"]["package-data"]["*"])
    expected = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for pattern in patterns
        for path in (ROOT / name).rglob(pattern)
    }
    code = {name for name in packed if ".dist-info/" not in name}
    assert code == expected - {"kernels/__init__.py"}
    clashes = [name for name in code if (SITE / name).exists()]
    assert not clashes, "the wheel would overwrite files of others"
    assert any(name.endswith("licenses/LICENSE") for name in packed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(True, marks=needs_theirs),
        pytest.param(False, marks=pytest.mark.exhaustive),
    ],
)
def test_wheel_imports_with_and_without_hugging_faces_kernels(theirs, wheel, tmp_path):
    site = farm(tmp_path / "site", theirs=theirs)
    zipfile.ZipFile(wheel).extractall(site)
    run(WITH_THEIRS if theirs else WITHOUT_THEIRS, site, cwd=tmp_path)


@needs_theirs
@pytest.mark.exhaustive
@pytest.mark.slow
def test_editable_install_imports_with_hugging_faces_kernels(sources, tmp_path):
    site = farm(tmp_path / "site", theirs=True)
    zipfile.ZipFile(build(sources, "build_editable", tmp_path / "dist")).extractall(site)
    code = (
        f"import sys, site; sys.path.remove({str(site)!r}); "
        f"site.addsitedir({str(site)!r})\n{WITH_THEIRS}"
        f"assert kernels.index.__file__.startswith({str(sources)!r})"
    )
    run(code, site, cwd=tmp_path)


@pytest.mark.slow
def test_source_archive_builds_the_same_wheel(unpacked, wheel, tmp_path):
    """Tests, docs and notebooks are in it: all but the history."""
    expected = {Path(name) for name in FILES} | {
        path.relative_to(ROOT)
        for name in FOLDERS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not set(path.relative_to(ROOT).parts) & set(LEFTOVERS)
    }
    assert {path for path in expected if not (unpacked / path).is_file()} == set()
    again = build(unpacked, "build_wheel", tmp_path / "again")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_source_archive_passes_its_tests(unpacked):
    names = ("test_kinds.py", "conformance/test_store.py", "kernels/test_patterns.py")
    named = [f"tests/{name}" for name in names]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *named]
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
