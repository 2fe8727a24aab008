"""The backend that a search goes by, found by calling it."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts import HeadwiseError, ModelInfo
from kernels.native import build
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from search.model.layers import serving_backend


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelInfo:
    loaded = load_model(str(tiny_model), dtype="float32")
    return fingerprint(loaded.model, name=loaded.name)


def test_kernels_that_do_not_compile_are_told_in_one_line(
    model: ModelInfo, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "false")
    # Not what this process has loaded before.
    monkeypatch.setattr(build, "load", build._load)
    assert serving_backend("auto", model, "float32", "cpu") == "reference"
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("only the reference backend serves here")
    assert "false" in said
    for options in ({"quiet": True}, {"backend": "reference"}):
        assert serving_backend(
            **{"backend": "auto", "model": model, "dtype": "float32", "device": "cpu"} | options
        )
    assert capfd.readouterr().err == ""
    with pytest.raises(
        HeadwiseError, match=r"--backend cpu: backend 'cpu' cannot serve this call: .*false"
    ):
        serving_backend("cpu", model, "float32", "cpu")


def test_with_kernels_nothing_is_said(model: ModelInfo, capfd: pytest.CaptureFixture[str]) -> None:
    assert serving_backend("auto", model, "float32", "cpu") == "cpu"
    assert capfd.readouterr().err == ""
    with pytest.raises(HeadwiseError, match="--backend abacus: unknown backend 'abacus'"):
        serving_backend("abacus", model, "float32", "cpu")
