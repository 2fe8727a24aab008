"""Native code: a wheel's library, or a build at first use that never leaves half a library."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.native import build, prebuilt

load = build.load.__wrapped__


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder in which nothing has been built."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """compiler(body): CXX is a script of these words, of which the path is returned."""

    def compiler(body):
        path = tmp_path / "c++"
        path.write_text(f'#!/bin/sh\ncase "$*" in *--version) exit;; esac\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))
        return str(path)

    return compiler


# Writes the compiler's output file and counts the calls.
JUNK = 'while [ "$1" != "-o" ]; do shift; done; echo junk > "$2"; echo run >> {0}/runs'


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().split())


@pytest.mark.parametrize("named", [None, "no-such-compiler -O1", " "])
def test_build_without_compiler_names_reason(cache, monkeypatch, named):
    """A missing compiler named in CXX is not replaced by another."""
    expected = f"no C++ compiler found: CXX is {named!r}"
    if named is None:
        monkeypatch.setenv("PATH", str(cache))
        expected = "no C++ compiler found (install g++, or set CXX)"
    else:
        monkeypatch.setenv("CXX", named)
    assert load() == expected
    assert not cache.exists()


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
def test_build_with_failing_compiler_names_reason(cache, compiler, monkeypatch, body, reason):
    command = f"{compiler(body)} --wrapped"
    monkeypatch.setenv("CXX", command)
    assert load() == f"{command} failed: {reason}"
    assert list(cache.iterdir()) == []


def test_build_with_unwritable_cache_names_reason(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "file"))
    reason = str(load())
    assert "cannot be stored" in reason and "HEADWISE_CACHE moves the cache folder" in reason


def test_build_without_home_folder_names_reason(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HEADWISE_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert "Could not determine home directory" in str(load())


def test_build_folders_are_writable_by_owner_only(cache, compiler):
    compiler("exit 1")
    before = os.umask(0)
    try:
        assert "c++ failed" in str(load())
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache.parent, cache)] == [0o755, 0o700]
    cache.chmod(0o755)
    assert "c++ failed" in str(load())
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_build_recompiles_library_that_does_not_load(cache, compiler, tmp_path, caplog):
    compiler(JUNK.format(tmp_path))
    assert "the compiled library cannot be loaded" in str(load())
    # Each source once, and the library.
    assert runs(tmp_path) == len(build.SOURCES) + 1
    assert caplog.messages == []
    (library,) = cache.glob("*.so")
    library.write_text("cut off")
    assert "the compiled library cannot be loaded" in str(load())
    assert library.read_text() == "junk\n"
    assert runs(tmp_path) == 2 * (len(build.SOURCES) + 1)
    assert caplog.messages == ["the compiled CPU kernels do not load: compiling them again"]


def test_load_rejects_truncated_library(tmp_path):
    """Loading a truncated library would crash the process."""
    if reason := build.load():
        pytest.skip(reason)
    command = build.find_compiler()
    assert isinstance(command, list)
    library = build.cache_folder() / f"cpu-{build._key(command)}.so"
    cut = tmp_path / "cut.so"
    cut.write_bytes(library.read_bytes()[:5000])
    assert build._why_not_loaded(cut) == "the compiled library cannot be loaded: it is cut off"


def test_build_in_threads_runs_one_at_a_time(monkeypatch):
    running, peak = 0, 0

    def slow():
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        time.sleep(0.02)
        running -= 1

    monkeypatch.setattr(build, "_load", slow)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: load(), range(4))) == [None] * 4
    assert peak == 1


def test_build_in_processes_compiles_once(cache, compiler, tmp_path, monkeypatch):
    """A file lock serializes processes, and threads as well."""
    compiler(JUNK.format(tmp_path) + "; sleep 0.1")
    monkeypatch.setattr(
        build, "_why_not_loaded", lambda library: None if library.exists() else "it is not there"
    )
    both = threading.Barrier(2)
    lock = build._lock

    def together(library):
        both.wait()
        return lock(library)

    monkeypatch.setattr(build, "_lock", together)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: build._load(), range(2))) == [None] * 2
    assert runs(tmp_path) == len(build.SOURCES) + 1


def test_library_key_depends_on_its_inputs(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("where", "remedy"),
    [("root", "chmod go-w it"), ("folder", "empty it and chmod 700 it"), ("library", "remove it")],
)
def test_load_rejects_library_writable_by_others(cache, compiler, where, remedy):
    """Loading a library executes its code."""
    planted = cache / f"cpu-{build._key([compiler('exit 1')])}.so"
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
            f"{mode:o}): {remedy} (HEADWISE_CACHE moves the cache folder)"
        )
        assert planted.read_bytes() == b"planted"
    place.chmod(0o755)
    assert "c++ failed" in str(load())


def test_load_rejects_library_of_another_owner(cache, compiler, monkeypatch):
    compiler("exit 1")
    cache.mkdir(parents=True, mode=0o700)
    owner = cache.stat().st_uid
    # Also root's folder is not another user's own.
    monkeypatch.setattr(build.os, "geteuid", lambda: owner + 1)
    assert load() == (
        f"compiled kernels are not taken from there: {cache} belongs to user {owner}, not to "
        f"{owner + 1} (HEADWISE_CACHE moves the cache folder)"
    )
    if owner == 0:
        os.chown(cache, 1, -1)
        monkeypatch.setattr(build.os, "geteuid", lambda: 4711)
        assert "belongs to user 1, not to 4711" in str(load())


X86 = prebuilt.LEVELS["x86_64"]
AVX2 = X86["avx2"][1]
AVX512 = X86["avx512"][1]


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """A wheel's folder with a file for each level of x86-64."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "library", lambda level, folder=tmp_path: folder / f"{level}.so")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for level in X86:
        (tmp_path / f"{level}.so").write_bytes(b"junk")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ({"sse2"}, None),
        (AVX2 - {"fma"}, None),
        (AVX2 | {"avx512f"}, "avx2"),
        (AVX512, "avx512"),
        (AVX512 | {"avx512_bf16", "amx_bf16"}, "avx512_bf16"),
    ],
)
def test_wheel_library_uses_best_supported_level(brought, monkeypatch, flags, level):
    monkeypatch.setattr(prebuilt, "processor_flags", lambda: frozenset(flags))
    assert prebuilt.find() == (brought / f"{level}.so" if level else None)
    (brought / "avx512.so").unlink()
    if level == "avx512":
        assert prebuilt.find() == brought / "avx2.so"
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert prebuilt.find() is None


def test_wheel_library_requires_its_torch_release(monkeypatch, tmp_path):
    named = set()
    for version in ("2.13.0+cpu", "2.13.1", "2.14.0"):
        monkeypatch.setattr(torch, "__version__", version)
        named.add(prebuilt.library("avx2", tmp_path).name)
    assert named == {"cpu-avx2-torch2.13.so", "cpu-avx2-torch2.14.so"}


def test_cpu_flags_are_read_from_linux_format(tmp_path):
    for line in ("flags\t\t: fpu avx2 fma", "Features\t: fp asimd"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t: none\n")
        expected = frozenset(line.split(": ")[1].split())
        assert prebuilt.processor_flags(tmp_path / "cpuinfo") == expected
    assert prebuilt.processor_flags(tmp_path / "missing") == frozenset()


def test_wheel_library_that_does_not_load_is_compiled_instead(brought, cache, monkeypatch, caplog):
    monkeypatch.setattr(prebuilt, "processor_flags", lambda: AVX2)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert load() == "no C++ compiler found (install g++, or set CXX)"
    reason = "the CPU kernels of the wheel are not used: the compiled library cannot be loaded"
    assert reason in caplog.text
