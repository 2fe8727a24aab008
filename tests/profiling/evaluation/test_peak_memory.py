"""Peak memory of a prefill next to the model."""

from __future__ import annotations

import subprocess

import pytest

import artifacts
from artifacts import HeadwiseError
from profiling.evaluation import peak_memory
from profiling.evaluation.methods import Methods
from profiling.evaluation.peak_memory import peak_of
from profiling.models.loading import load_model
from tests.processes import Process

# Keys and values: 3 layers of 2 heads of 16 numbers of 4 bytes, twice.
TOKEN = 3 * 2 * 16 * 4 * 2


@pytest.fixture
def peak(searched, monkeypatch):
    """peak(name, length) -> bytes of a method's prefill."""
    spec = str(searched / "tiny")
    loaded = load_model(spec, dtype="float32")
    methods = Methods(loaded, *artifacts.load_pair(searched / "cfg.yaml"))

    def run(command, **_):
        """In a fork of a process that has imported torch: a new one would do so first."""
        assert command[1] == "-m"
        return subprocess.CompletedProcess(command, *Process(*command[2:]).finish())

    monkeypatch.setattr(peak_memory.subprocess, "run", run)

    def measure(name, length, spec=spec):
        return peak_of(loaded, methods.make(name, length), length, spec=spec, revision=None)

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "dense_kernel", "headwise"])
def test_peak_of_a_method_counts_keys_and_values(name, peak):
    assert TOKEN * 900 // 2 <= peak(name, 900) < 2**30


def test_peak_of_a_process_that_fails_names_method_and_reason(peak):
    with pytest.raises(HeadwiseError, match=r"of dense .* error: .*'nowhere\.gguf'"):
        peak("dense", 300, spec="nowhere.gguf")
