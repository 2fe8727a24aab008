"""headwise doctor: what it says of a machine that is well, and of one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.native import build
from profiling import doctor


def test_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.load() is None
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == [] and found["kernels"]["cpu"] in ("compiled", "prebuilt")
    assert found["kernels"]["engines"]["float32"][-1] == "float"
    assert found["check"]["cpu"] is None
    assert all(0 < each["prefill_s"] < each["search_s"] for each in found["expected"].values())
    text = doctor.report(found)
    assert text.startswith("all is well\n") and "what to expect at 4,096 tokens" in text


def test_it_is_loud_about_the_slow_reference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = SimpleNamespace(
        load=lambda: "no C++ compiler found", find_compiler=lambda: "no C++ compiler found", cache_folder=Path
    )
    monkeypatch.setattr(doctor, "build", broken)
    assert doctor.main([]) == 3
    said = capsys.readouterr().out
    assert said.startswith("WRONG      attention on the CPU falls to the slow reference, ")
    assert "no C++ compiler found" in said and "what to expect" not in said


def test_a_kernel_that_is_wrong_or_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.dense_attention

    def wrong(*args: Any, **how: Any) -> Any:
        out, lse = real(*args, **how)
        return out + (0.0 if how.get("backend") == "reference" else 1.0), lse

    def fails(*args: Any, **how: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(doctor, "dense_attention", wrong)
    assert doctor.check()["cpu"] == "the kernel does not agree with the fp32 reference"
    monkeypatch.setattr(doctor, "dense_attention", fails)
    assert doctor.check()["cpu"] == "the kernel fails with RuntimeError"
    found = {"kernels": {"reason": None}, "cache": {"state": "safe"}, "check": doctor.check()}
    assert list(doctor._wrong(found)) == ["attention on cpu: the kernel fails with RuntimeError"]


def test_it_sees_a_cache_that_others_can_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert doctor._state(tmp_path) == "unsafe: others can write to it (mode 777)"
    tmp_path.chmod(0o700)
    assert doctor._state(tmp_path) == "safe, yours alone"
    assert doctor._state(tmp_path / "none") == "made at first use"
