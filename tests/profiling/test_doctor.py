"""headwise doctor: what it says of a machine that is well, and of one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernels.native import build
from profiling import doctor
from profiling.speed import machine


def test_it_says_what_there_is(capsys):
    assert build.load() is None
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == [] and found["kernels"]["cpu"] in ("compiled", "prebuilt")
    assert found["kernels"]["engines"]["float32"][-1] == "float"
    tiles = found["kernels"]["why_no_tiles"] is None
    assert ("amx" in found["kernels"]["engines"]["bfloat16"]) is tiles
    assert found["check"]["cpu"] is None
    assert all(0 < each["prefill_s"] < each["search_s"] for each in found["expected"].values())
    assert 0 < found["dense"]["sparse_density"] < 0.5
    assert {each["length"] for each in found["gains"]} == {4096, 8192, 32768}
    assert all(0 < each["sparse_s"] <= each["dense_s"] for each in found["gains"])


def test_it_prints_as_it_goes_and_ends_with_the_gain(monkeypatch, capsys):
    printed = []

    def measured():
        printed.append(capsys.readouterr().out)
        seconds = {"kernel_s": 0.1, "sdpa_s": 0.1, "head_s": 0.05, "sparse_s": 0.03}
        rates = {"flops_a_second": 1e12, "sparse_density": 0.25, "sparse_cost": 1.2}
        return {**seconds, **rates, "dtype": "bfloat16"}

    monkeypatch.setattr(machine, "_dense", measured)
    assert doctor.main([]) == 0
    assert printed[0].startswith("processor ") and printed[0].endswith("all is well\n")
    assert "what to expect at 4,096 tokens" in capsys.readouterr().out


def test_the_gain_is_what_the_density_leaves_of_attention():
    dense = {"head_s": 0.1, "flops_a_second": 1e12, "sparse_cost": 1.0, "dtype": "bfloat16"}
    small = [gain for gain in machine.gains(dense) if gain.model.startswith("135M")]
    for gain in small:
        attention = 30 * 9 * 0.1 * (gain.length / 4096) ** 2
        assert gain.dense_s - gain.sparse_s == pytest.approx(attention * (1 - gain.density))
    ratios = [gain.dense_s / gain.sparse_s for gain in small]
    assert ratios == sorted(ratios)
    # Weights of 8B in bfloat16 are 16 GB: no gain is said where they do not fit.
    assert {gain.model[:2] for gain in machine.gains(dense, 16_000_000_000)} == {"13", "1B"}
    assert {gain.model[:2] for gain in machine.gains(dense, 17_000_000_000)} == {"13", "1B", "8B"}
    # Patterns that cost more than all keys are not served.
    slow = machine.gains({**dense, "sparse_cost": 100.0})
    assert all(gain.sparse_s == gain.dense_s for gain in slow)


def test_times_of_a_busy_machine_are_said_to_be_long():
    dense = {
        "dtype": "float32",
        "kernel_s": 1.0,
        "sdpa_s": 1.0,
        "sparse_s": 0.5,
        "sparse_density": 0.3,
    }
    busy = {"processor": {"cores": 2, "load": 6.31}, "dense": dense}
    assert doctor.lines_of("dense", busy)[0].startswith("busy       a load of 6.3 on 2 cores")
    quiet = {"processor": {"cores": 2, "load": 1.9}, "dense": dense}
    assert doctor.lines_of("dense", quiet) == doctor.lines_of("dense", busy)[1:]


def test_it_is_loud_about_the_slow_reference(monkeypatch, capsys):
    def missing():
        return "no C++ compiler found"

    broken = SimpleNamespace(load=missing, find_compiler=missing, cache_folder=Path)
    monkeypatch.setattr(machine, "build", broken)
    assert doctor.main([]) == 3
    said = capsys.readouterr().out
    assert "WRONG      attention on the CPU falls to the slow reference, " in said
    assert "no C++ compiler found" in said
    assert "all is well" not in said and "what to expect" not in said


def test_a_kernel_that_is_wrong_or_fails_is_said(monkeypatch):
    real = machine.dense_attention

    def wrong(*args, **how):
        out, lse = real(*args, **how)
        return out + (0.0 if how.get("backend") == "reference" else 1.0), lse

    def fails(*args, **how):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(machine, "dense_attention", wrong)
    assert machine.check()["cpu"] == "the kernel does not agree with the fp32 reference"
    monkeypatch.setattr(machine, "dense_attention", fails)
    assert machine.check()["cpu"] == "the kernel fails with RuntimeError"
    found = {"kernels": {"reason": None}, "cache": {"state": "safe"}, "check": machine.check()}
    assert list(machine._wrong(found)) == ["attention on cpu: the kernel fails with RuntimeError"]


def test_it_sees_a_cache_that_others_can_write_to(tmp_path):
    tmp_path.chmod(0o777)
    assert machine._state(tmp_path) == "unsafe: others can write to it (mode 777)"
    tmp_path.chmod(0o700)
    assert machine._state(tmp_path) == "safe, yours alone"
    assert machine._state(tmp_path / "none") == "made at first use"
