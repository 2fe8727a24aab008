"""The device and dtype of a command."""

from __future__ import annotations

import pytest
import torch

from artifacts import HeadwiseError
from artifacts.cli import command
from artifacts.cli.options import CommandConfig
from profiling.models.device import default_dtype, resolve_device, settled
from tests.runtime.tiny import tiny_model


class Options(CommandConfig):
    device: str = "auto"
    dtype: str = "auto"


@pytest.mark.parametrize(
    ("device", "has_gpu", "resolved"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda:1", True, "cuda:1"),
        ("cuda", False, "cuda"),
    ],
)
def test_resolve_device_auto_is_the_gpu_that_torch_sees(monkeypatch, device, has_gpu, resolved):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device(device) == resolved


@pytest.mark.parametrize(
    ("device", "instructions", "dtype"),
    [("cpu", True, "bfloat16"), ("cpu", False, "float32"), ("cuda:1", False, "bfloat16")],
)
def test_default_dtype_is_the_fast_one_of_the_device(monkeypatch, device, instructions, dtype):
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: instructions, raising=False
    )
    assert default_dtype(device) == dtype


def test_settled_decides_device_and_dtype_and_reports_the_device(monkeypatch, capsys):
    config = settled(Options(device="cpu"))
    assert config == Options(device="cpu", dtype=default_dtype("cpu"))
    out, err = capsys.readouterr()
    assert out == "", "the result of a command, which may be JSON"
    assert err.startswith(f"device: cpu ({torch.get_num_threads()} threads, ")
    assert err.count("\n") == 1
    assert settled(config, quiet=True) == config
    # headwise -q
    monkeypatch.setattr(command, "verbosity", -1)
    assert settled(Options(device="cpu")) == config
    assert capsys.readouterr().err == ""


def test_settled_of_a_loaded_model_takes_its_device_and_dtype(capsys):
    model = tiny_model().half()
    for asked in (Options(), Options(device="cuda", dtype="float32")):
        assert settled(asked, model) == Options(device="cpu", dtype="float16")
    assert capsys.readouterr().err == ""


def test_settled_refuses_a_device_that_torch_does_not_know():
    with pytest.raises(HeadwiseError, match=r"'gpu'.*--device"):
        settled(Options(device="gpu"))
