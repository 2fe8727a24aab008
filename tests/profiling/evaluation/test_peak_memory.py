"""Peak memory of a prefill next to the model."""

from __future__ import annotations

import json
import subprocess

import pytest

import artifacts
from artifacts import HeadwiseError
from profiling.evaluation import peak_memory
from profiling.evaluation.methods import Methods
from profiling.evaluation.peak_memory import peak_of
from profiling.models.loading import load_model

# Keys and values: 3 layers of 2 heads of 16 numbers of 4 bytes, twice.
TOKEN = 3 * 2 * 16 * 4 * 2


@pytest.fixture
def peak(searched):
    """peak(name, length) -> bytes of a method's prefill."""
    spec = str(searched / "tiny")
    loaded = load_model(spec, dtype="float32")
    methods = Methods(loaded, *artifacts.load_pair(searched / "cfg.yaml"))

    def measure(name, length):
        return peak_of(loaded, methods.make(name, length), length, spec=spec, revision=None)

    return measure


@pytest.mark.slow
def test_peak_of_headwise_counts_keys_and_values_in_a_new_process(peak):
    assert peak("headwise", 900) >= TOKEN * 900 // 2


@pytest.mark.parametrize("name", ["dense", "dense_kernel", "headwise"])
def test_peak_of_every_method_is_what_its_process_prints(name, peak, monkeypatch, capsys):
    def run(command, **_):
        """Measure in this process, whose peak proves nothing: a new one takes seconds."""
        assert command[1:3] == ["-m", "profiling.evaluation.peak_memory"]
        prefill = json.loads(command[3])
        assert (prefill["length"], prefill["dtype"]) == (300, "float32")
        assert (prefill["config"] is not None) == (name == "headwise")
        peak_memory.main(command[3:])
        return subprocess.CompletedProcess(command, 0, capsys.readouterr().out, "")

    monkeypatch.setattr(peak_memory.subprocess, "run", run)
    assert peak(name, 300) >= 0


def test_peak_of_a_process_that_fails_names_method_and_reason(peak, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 2, "", "warning\nerror: no such model\n")

    monkeypatch.setattr(peak_memory.subprocess, "run", run)
    with pytest.raises(HeadwiseError, match=r"peak memory of dense .* error: no such model"):
        peak("dense", 300)
