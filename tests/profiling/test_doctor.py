"""headwise doctor: facts about a machine that is well or not, and estimates for a model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from artifacts import HeadwiseError
from headwise.__main__ import main
from kernels.native import build
from profiling import doctor
from profiling.speed import attention_speed
from profiling.speed.attention_speed import Speed

# Seconds of a layer's attention on 4,096 tokens: dense 0.1, by a pattern of density 0.25 a quarter.
ATTENTION = Speed(
    pattern="a_shape",
    sizes={},
    density=0.25,
    tiles=1,
    flops=1.0,
    sdpa_seconds=0.2,
    kernel_seconds=0.1,
    sparse_seconds=0.02,
    build_seconds=0.005,
)


def estimates(attention: Speed = ATTENTION, **changes: Any) -> list[dict[str, float]]:
    """Estimates of a model of ten layers, of which one takes 0.5 s on 4,096 tokens."""
    config = LlamaConfig(num_hidden_layers=10, max_position_embeddings=8192)
    for name, value in changes.items():
        setattr(config, name, value)
    timed = min(4096, config.max_position_embeddings)
    return doctor.estimates(config, timed, 0.5, attention)


def test_doctor_reports_facts_and_estimates_for_a_model(folder, capsys):
    model = str(folder)
    assert build.load() is None
    assert main(["doctor", "--json", "--model", model, "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] == [] and report["on cpu"] == "the kernels agree with the fp32 reference"
    assert "float32 by float" in report["kernels"]
    # The model has 1,024 positions.
    (row,) = report["estimates"]
    assert row["tokens"] == 1024 and 0 < row["headwise_s"] <= row["dense_s"]
    assert row["dense_s"] < row["search_least_s"] < row["search_most_s"]
    assert main(["doctor", "--model", model, "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("processor ") and "all is well" in out
    assert "times       tiny, within a factor of two" in out, "the folder's name"
    assert "rounds differ by" in out and "default search on a CPU" in out


def test_estimates_take_off_attention_what_the_density_leaves_out():
    short, long = estimates()
    assert (short["tokens"], long["tokens"]) == (4096, 8192)
    # Attention grows with the square of the length, the rest with the length.
    assert short["dense_s"] == pytest.approx(10 * (0.4 + 0.1))
    assert long["dense_s"] == pytest.approx(10 * (0.8 + 0.4))
    # At density 0.25 patterns take a quarter of dense attention.
    for row, attention, density in ((short, 1.0, 0.36), (long, 4.0, 0.38)):
        assert row["dense_s"] - row["headwise_s"] == pytest.approx(attention * (1 - density))
    slow = estimates(replace(ATTENTION, sparse_seconds=9.0))
    assert all(row["headwise_s"] == row["dense_s"] for row in slow)
    least, most = doctor.PREFILLS
    for row in slow:
        assert row["search_least_s"] == pytest.approx(least * row["dense_s"])
        assert row["search_most_s"] == pytest.approx(most * row["dense_s"])


def test_estimates_of_sliding_layers_count_their_window_alone():
    short, long = estimates(sliding_window=512)
    band = 1 - (1 - 512 / 4096) ** 2
    assert short["dense_s"] == short["headwise_s"] == pytest.approx(10 * (0.4 + 0.1 * band))
    assert long["dense_s"] < 2.1 * short["dense_s"]


def test_estimates_stay_within_the_positions_of_the_model():
    assert [row["tokens"] for row in estimates(max_position_embeddings=2048)] == [2048]


def test_doctor_without_kernels_fails_and_estimates_nothing(folder, monkeypatch, capsys):
    monkeypatch.setattr(build, "load", lambda: "no C++ compiler found")
    assert main(["doctor", "--model", str(folder)]) == 3
    out = capsys.readouterr().out
    assert "kernels     none: no C++ compiler found" in out
    assert "faults      on cpu: attention runs by the slow reference, " in out
    assert "all is well" not in out and "first token" not in out


def test_check_reports_a_kernel_that_is_wrong_or_fails(monkeypatch):
    real = attention_speed.sparse_attention
    monkeypatch.setattr(
        attention_speed, "sparse_attention", lambda *arguments: real(*arguments) + 1
    )
    assert str(doctor.check("cpu")).startswith("the kernel fails: HeadwiseError: ")

    def fails(*arguments):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(attention_speed, "sparse_attention", fails)
    assert doctor.check("cpu") == "the kernel fails: RuntimeError: no such instruction"


def test_doctor_without_a_model_prints_facts_alone(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "faults      none, all is well" in out and "times" not in out


def test_doctor_refuses_a_model_without_attention_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(HeadwiseError, match="MambaConfig"):
        main(["doctor", "--model", str(tmp_path)])
