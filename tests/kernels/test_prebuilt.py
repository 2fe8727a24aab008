"""The library of a wheel that a processor takes; `.ci/wheel` builds and serves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kernels.native import build, prebuilt

X86 = prebuilt.LEVELS["x86_64"]
AVX2 = X86["avx2"][1]
AVX512 = X86["avx512"][1]


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
        (AVX2, "avx2"),
        (AVX2 | {"avx512f"}, "avx2"),
        (AVX512, "avx512"),
        (AVX512 | {"avx512_bf16", "amx_bf16"}, "avx512_bf16"),
    ],
)
def test_the_best_level_is_taken(
    brought: Path, monkeypatch: pytest.MonkeyPatch, flags: set[str], level: str | None
) -> None:
    monkeypatch.setattr(prebuilt, "processor_flags", lambda: frozenset(flags))
    assert prebuilt.find() == (brought / f"{level}.so" if level else None)


def test_what_the_wheel_lacks_is_the_next_one_s(
    brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "processor_flags", lambda: AVX512)
    (brought / "avx512.so").unlink()
    assert prebuilt.find() == brought / "avx2.so"
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert prebuilt.find() is None


def test_a_library_is_one_release_of_torch_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = set()
    for version in ("2.13.0+cpu", "2.13.1", "2.14.0"):
        monkeypatch.setattr(torch, "__version__", version)
        named.add(prebuilt.library("avx2", tmp_path).name)
    assert named == {"cpu-avx2-torch2.13.so", "cpu-avx2-torch2.14.so"}


def test_flags_as_linux_writes_them(tmp_path: Path) -> None:
    for line in ("flags\t\t: fpu avx2 fma", "Features\t: fp asimd"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t: none\n")
        assert prebuilt.processor_flags(tmp_path / "cpuinfo") == frozenset(
            line.split(": ")[1].split()
        )
    assert prebuilt.processor_flags(tmp_path / "missing") == frozenset()


def test_one_that_does_not_load_is_compiled_instead(
    brought: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(prebuilt, "processor_flags", lambda: AVX2)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert build.load.__wrapped__() == "no C++ compiler found (install g++, or set CXX)"
    assert (
        "the CPU kernels of the wheel are not used: the compiled library cannot be loaded"
        in caplog.text
    )
