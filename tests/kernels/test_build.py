"""Native code: a wheel's library, or a build at first use that never leaves half a library."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.native import build, prebuilt

load = build.load.__wrapped__
# Writes the compiler's output file and counts the calls.
JUNK = 'while [ "$1" != "-o" ]; do shift; done; echo junk > "$2"; echo run >> {0}/runs'


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
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return str(path)

    return compiler


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
        ("echo 'cpu.cpp: In f:' >&2; echo 'cpu.cpp:9: error: boom' >&2; exit 1", "cpu.cpp:9: err"),
        ("kill -9 $$", "no message"),
    ],
)
def test_build_with_failing_compiler_names_reason(cache, compiler, monkeypatch, body, reason):
    command = f"{compiler(body)} --wrapped"
    monkeypatch.setenv("CXX", command)
    assert load().startswith(f"{command} failed: {reason}")
    assert list(cache.iterdir()) == []


def test_build_without_a_folder_names_reason(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "file"))
    assert "cannot be stored" in load() and "HEADWISE_CACHE moves the cache folder" in load()

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HEADWISE_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    assert "Could not determine home directory" in load()


def test_build_recompiles_library_that_does_not_load(cache, compiler, tmp_path, caplog):
    compiler(JUNK.format(tmp_path))
    for messages in ([], ["the compiled CPU kernels do not load: compiling them again"]):
        assert "the compiled library cannot be loaded" in load()
        # Each source once, and the library.
        assert runs(tmp_path) == (1 + len(messages)) * (len(build.SOURCES) + 1)
        assert caplog.messages == messages
        (library,) = cache.glob("*.so")
        assert library.read_text() == "junk\n"
        library.write_text("cut off")


def test_load_rejects_truncated_library(tmp_path):
    """Loading a truncated library would crash the process."""
    if reason := build.load():
        pytest.skip(reason)
    library = build.cache_folder() / f"cpu-{build._key(build.find_compiler())}.so"
    cut = tmp_path / "cut.so"
    cut.write_bytes(library.read_bytes()[:5000])
    assert build._why_not_loaded(cut) == "the compiled library cannot be loaded: it is cut off"


@pytest.mark.parametrize("entry", [load, build._load])
def test_concurrent_builds_compile_once(entry, cache, compiler, tmp_path, monkeypatch):
    """`load` serializes threads, and a file's lock processes, here two threads without `load`."""
    compiler(JUNK.format(tmp_path) + "; sleep 0.1")
    monkeypatch.setattr(
        build, "_why_not_loaded", lambda library: None if library.exists() else "it is not there"
    )
    both = threading.Barrier(2)
    lock = build._lock
    locked = []

    def together(library):
        locked.append(library)
        if entry is build._load:
            both.wait()
        return lock(library)

    monkeypatch.setattr(build, "_lock", together)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: entry(), range(2))) == [None] * 2
    assert runs(tmp_path) == len(build.SOURCES) + 1
    # The second thread of `load` finds the library.
    assert len(locked) == (1 if entry is load else 2)


def test_library_key_depends_on_its_inputs(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    keys = {build._key(["c++"]), build._key(["clang++"]), build._key(["c++", "-O1"])}
    for version in ("12.2", "14.1"):
        compiler.write_text(f"#!/bin/sh\necho {version}\n")
        compiler.chmod(0o700)
        keys.add(build._key([str(compiler)]))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-mno-avx512f"))
    keys.add(build._key(["c++"]))
    assert len(keys) == 6 and build._key(["c++"]) in keys


def test_build_folders_are_writable_by_owner_only(cache, compiler):
    compiler("exit 1")
    before = os.umask(0)
    try:
        assert "c++ failed" in load()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache.parent, cache)] == [0o755, 0o700]
    cache.chmod(0o755)
    assert "c++ failed" in load()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


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
    for mode in (0o757, 0o775):
        place.chmod(mode)
        assert load() == (
            f"compiled kernels are not taken from there: others can write to {place} (mode "
            f"{mode:o}): {remedy} (HEADWISE_CACHE moves the cache folder)"
        )
    place.chmod(0o755)
    assert "c++ failed" in load()


def test_load_rejects_library_of_another_owner(cache, compiler, monkeypatch):
    compiler("exit 1")
    cache.mkdir(parents=True, mode=0o700)
    owner = cache.stat().st_uid
    # Also root's folder is not another user's own.
    monkeypatch.setattr(build.os, "geteuid", lambda: owner + 1)
    assert f"{cache} belongs to user {owner}, not to {owner + 1}" in load()


X86 = prebuilt.LEVELS["x86_64"]
AVX2 = X86["avx2"][1]
AVX512 = X86["avx512"][1]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel's folder with a file for each level of x86-64."""
    library = prebuilt.library
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "library", lambda level: library(level, tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for level in X86:
        prebuilt.library(level).write_bytes(b"junk")


@pytest.mark.usefixtures("wheel")
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
def test_wheel_library_uses_best_supported_level(monkeypatch, flags, level):
    monkeypatch.setattr(prebuilt, "processor_flags", lambda: frozenset(flags))
    assert prebuilt.find() == (prebuilt.library(level) if level else None)
    prebuilt.library("avx512").unlink()
    if level == "avx512":
        assert prebuilt.find() == prebuilt.library("avx2")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert prebuilt.find() is None


@pytest.mark.usefixtures("wheel")
def test_wheel_library_requires_its_torch_release(monkeypatch):
    monkeypatch.setattr(prebuilt, "processor_flags", lambda: AVX2)
    assert prebuilt.find() is not None
    monkeypatch.setattr(torch, "__version__", "1.99.0+cpu")
    assert prebuilt.find() is None


@pytest.mark.usefixtures("wheel", "cache")
def test_wheel_library_that_does_not_load_is_compiled_instead(monkeypatch, caplog):
    monkeypatch.setattr(prebuilt, "processor_flags", lambda: AVX2)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert load() == "no C++ compiler found (install g++, or set CXX)"
    reason = "the CPU kernels of the wheel are not used: the compiled library cannot be loaded"
    assert reason in caplog.text


def test_cpu_flags_are_read_from_linux_format(tmp_path):
    for line in ("flags\t\t: fpu avx2 fma", "Features\t: fp asimd"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t: none\n")
        expected = frozenset(line.split(": ")[1].split())
        assert prebuilt.processor_flags(tmp_path / "cpuinfo") == expected
    assert prebuilt.processor_flags(tmp_path / "missing") == frozenset()
