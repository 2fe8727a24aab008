"""The build at first use: what it says when it cannot, and that it never leaves half a library."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.native import build

ROOT = Path(build.__file__).parents[2]
load: Callable[[], str | None] = build.load.__wrapped__


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which nothing has been built."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "kernels"


def script(path: Path, body: str) -> Path:
    path.write_text(f'#!/bin/sh\ncase "$*" in *--version) exit;; esac\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def built() -> Path:
    """The library that this session uses."""
    if reason := build.load():
        pytest.skip(reason)
    compiler = build.find_compiler()
    assert isinstance(compiler, list)
    return build.cache_folder() / f"cpu-{build._key(compiler)}.so"


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    assert load() == "no C++ compiler found (install g++, or set CXX)"
    assert not cache.exists()


@pytest.mark.parametrize("named", ["no-such-compiler -O1", " "])
def test_the_named_compiler_is_missing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Another one is not taken in its stead."""
    monkeypatch.setenv("CXX", named)
    assert load() == f"no C++ compiler found: CXX is {named!r}"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "echo 'cpu.cpp: In function f:' >&2; echo 'cpu.cpp:9:1: error: boom' >&2; exit 1",
            "cpu.cpp:9:1: error: boom",
        ),
        ("echo 'no luck today' >&2; exit 4", "no luck today"),
        ("kill -9 $$", "no message"),
    ],
)
def test_a_compiler_that_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    compiler = script(tmp_path / "c++", body)
    monkeypatch.setenv("CXX", f"{compiler} --wrapped")
    assert load() == f"{compiler} --wrapped failed: {reason}"
    assert list(cache.iterdir()) == []


def test_a_cache_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "file"))
    assert "cannot be stored" in str(load()) and "HEADWISE_CACHE moves the cache folder" in str(
        load()
    )


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HEADWISE_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert "Could not determine home directory" in str(load())


def test_the_folders_are_nobody_elses_to_write(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "exit 1")))
    before = os.umask(0)
    try:
        assert "c++ failed" in str(load())
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache.parent, cache)] == [0o755, 0o700]
    cache.chmod(0o755)
    assert "c++ failed" in str(load())
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_library_that_was_cut_off_is_compiled_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = f'while [ "$1" != "-o" ]; do shift; done; echo junk > "$2"; echo run >> {tmp_path}/runs'
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", body)))
    assert "the compiled library cannot be loaded" in str(load())
    once = len((tmp_path / "runs").read_text().split())
    assert caplog.messages == []
    assert "the compiled library cannot be loaded" in str(load())
    assert len((tmp_path / "runs").read_text().split()) == 2 * once
    assert caplog.messages == ["the compiled CPU kernels do not load: compiling them again"]


@pytest.mark.slow
def test_a_library_that_was_cut_off_is_replaced(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        there.delenv("HEADWISE_CACHE")
        library = built()
    copy = 'while [ "$1" != "-o" ]; do shift; done; cp {0} "$2"'
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", copy.format(library))))
    compiler = build.find_compiler()
    assert isinstance(compiler, list)
    cache.mkdir(parents=True)
    (cache / f"cpu-{build._key(compiler)}.so").write_bytes(library.read_bytes()[:5000])
    program = "import torch\nfrom kernels.attention import cpu\nprint(cpu.engines(torch.float32))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["['float']"], done.stderr


def test_threads_build_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    def slow() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    monkeypatch.setattr(build, "_load", slow)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: load(), range(4))) == [None] * 4
    assert most == 1


def test_what_the_library_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = build._key(["c++"])
    assert key == build._key(["c++"])
    assert key != build._key(["clang++"]) and key != build._key(["c++", "-O1"])
    compiler = tmp_path / "c++"
    keys = set()
    for version in ("12.2", "14.1"):
        compiler.write_text(f"#!/bin/sh\necho {version}\n")
        compiler.chmod(0o700)
        keys.add(build._key([str(compiler)]))
    assert len(keys) == 2
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-mno-avx512f"))
    assert key != build._key(["c++"])


@pytest.mark.slow
def test_two_processes_build_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as there:
        there.delenv("HEADWISE_CACHE")
        library = built()
    body = 'while [ "$1" != "-o" ]; do shift; done; echo run >> {1}/runs; sleep 0.3; cp {0} "$2"'
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", body.format(library, tmp_path))))
    command = [sys.executable, "-c", "from kernels.native import build; print(build.load())"]
    all_of_them = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate(timeout=240)[0].split() for process in all_of_them] == [
        ["None"]
    ] * 2
    # Each source once, and the library.
    assert len((tmp_path / "runs").read_text().split()) == len(build.SOURCES) + 1


@pytest.mark.slow
def test_without_a_compiler_the_reference_serves(cache: Path, tmp_path: Path) -> None:
    program = (
        "import logging, torch\n"
        "logging.basicConfig(format='%(message)s')\n"
        "from kernels.attention import sparse_attention\n"
        "from kernels.patterns import LayerPlan, make\n"
        "q = torch.randn(1, 2, 70, 64)\n"
        "index = LayerPlan([make('dense')] * 2, 2).build(q, q)\n"
        "out = sparse_attention(q, q, q, index)\n"
        "dense = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)\n"
        "torch.testing.assert_close(out, dense)\n"
    )
    environment = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert (
        "backend 'cpu' not used: no C++ compiler found (install g++, or set CXX)" in result.stderr
    )


@pytest.mark.parametrize(
    ("where", "remedy"),
    [("root", "chmod go-w it"), ("folder", "empty it and chmod 700 it"), ("library", "remove it")],
)
def test_what_others_could_have_put_there_is_not_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, remedy: str
) -> None:
    """A library that is loaded is run."""
    compiler = str(script(tmp_path / "c++", "exit 1"))
    monkeypatch.setenv("CXX", compiler)
    planted = cache / f"cpu-{build._key([compiler])}.so"
    cache.mkdir(parents=True)
    for path in (cache.parent, cache):
        path.chmod(0o755)
    planted.write_bytes(b"planted")
    planted.chmod(0o755)
    place = {"root": cache.parent, "folder": cache, "library": planted}[where]
    for mode in (0o777, 0o775, 0o770):
        place.chmod(mode)
        assert load() == (
            f"compiled kernels are not taken from there: others can write to {place} (mode "
            f"{mode:o}): {remedy} "
            "(HEADWISE_CACHE moves the cache folder)"
        )
        assert planted.read_bytes() == b"planted"
    place.chmod(0o755)
    assert "c++ failed" in str(load())


def test_what_belongs_to_another_is_not_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "exit 1")))
    cache.mkdir(parents=True, mode=0o700)
    owner = cache.stat().st_uid
    # Also root's folder is not another user's own.
    monkeypatch.setattr(build.os, "geteuid", lambda: owner + 1)
    assert load() == (
        f"compiled kernels are not taken from there: {cache} belongs to user {owner}, not to "
        f"{owner + 1} "
        "(HEADWISE_CACHE moves the cache folder)"
    )
    if owner == 0:
        os.chown(cache, 1, -1)
        monkeypatch.setattr(build.os, "geteuid", lambda: 4711)
        assert "belongs to user 1, not to 4711" in str(load())
