"""The backend that a search goes by, found by calling it."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts import HeadwiseError
from kernels.native import build
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from search.model.layers import serving_backend


def test_kernels_that_do_not_compile_are_told_in_one_line(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    model = fingerprint(loaded.model, name=loaded.name)
    monkeypatch.setenv("CXX", "false")
    # Not what this process has loaded before.
    monkeypatch.setattr(build, "load", build._load)
    assert serving_backend("auto", model, "float32", "cpu") == "reference"
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("only the reference backend serves here")
    assert "false" in said
    assert serving_backend("auto", model, "float32", "cpu", quiet=True) == "reference"
    assert serving_backend("reference", model, "float32", "cpu") == "reference"
    assert capfd.readouterr().err == ""
    says = r"--backend cpu: backend 'cpu' cannot serve this call: .*false"
    with pytest.raises(HeadwiseError, match=says):
        serving_backend("cpu", model, "float32", "cpu")
    with pytest.raises(HeadwiseError, match="--backend abacus: unknown backend 'abacus'"):
        serving_backend("abacus", model, "float32", "cpu")
    monkeypatch.undo()
    assert serving_backend("auto", model, "float32", "cpu") == "cpu"
    assert capfd.readouterr().err == ""
