"""Memory of a prefill, predicted from a configuration and measured."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess

import pytest

import artifacts
from artifacts import HeadwiseError
from profiling import memory
from profiling.evaluation.methods import Methods
from profiling.memory_use import peak_memory
from profiling.memory_use.peak_memory import peak_of
from profiling.memory_use.plan import plan, read_shape
from profiling.models.loading import load_model

GIB = 2**30
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_an_8b_shape_counted_by_hand():
    shape, length = read_shape(json.dumps(LLAMA), "bfloat16"), 2**19
    plain = plan(shape, length, growing=False)
    assert shape.parameters == 8_030_261_248
    # 32 layers of 8 heads of 128 keys and as many values, two bytes each, 2**19 times.
    assert plain.cache == 64 * GIB and plain.bank == 0
    # Four hidden states of 4 GiB and three times the width of the MLP, 3.5 hidden states each.
    assert plain.passing == pytest.approx((4 + 3 * 3.5) * 4 * GIB, rel=0.01)
    assert plan(shape, length).cache == 72 * GIB
    banked = plan(shape, length, banked=27, growing=False)
    assert (banked.cache, banked.bank) == (5 * 2 * GIB, 27 * 2 * GIB)
    assert banked.device == banked.weights + banked.cache + banked.passing


def test_layers_that_slide_keep_a_window():
    gemma = LLAMA | {"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18}
    gemma |= {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512}
    shape = read_shape(json.dumps(gemma), "bfloat16")
    token = 2 * 256 * 2
    assert (shape.layers, shape.sliding) == (18, 15)
    assert plan(shape, 10_000, growing=False).cache == token * (3 * 10_000 + 15 * 512)


def test_the_command_says_what_fits(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    lengths = ["--length", "131072", "524288"]
    assert memory.main(["--plan", str(tmp_path), *lengths, "--memory", "139GB"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [(line[0], line[-1]) for line in lines] == [("131072", "yes"), ("524288", "no")]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("nowhere", "no shape in"),
        ('{"model_type": "nothing"}', "is no configuration of transformers"),
        ('{"model_type": "clip"}', "CLIPConfig has not the sizes that are needed to predict"),
    ],
)
def test_what_is_no_shape_of_a_model(plan, said):
    with pytest.raises(HeadwiseError, match=said):
        memory.main(["--plan", plan, "--length", "1024"])


# Keys and values: 3 layers of 2 heads of 16 numbers of 4 bytes, twice.
TOKEN = 3 * 2 * 16 * 4 * 2


def test_a_measurement_stands_beside_what_was_predicted(searched, tmp_path, monkeypatch):
    def run(command, **_):
        """Measure in this process, whose peak says nothing: one of its own takes seconds."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            peak_memory.main(command[3:])
        return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")

    monkeypatch.setattr(peak_memory.subprocess, "run", run)
    out = tmp_path / "out.json"
    command = f"--model {searched}/tiny {searched}/cfg.yaml --dtype float32 --dense --json {out}"
    memory.main([*command.split(), "--length", "900"])
    dense, headwise = json.loads(out.read_text())["rows"]
    assert (dense["length"], dense["method"], headwise["method"]) == (900, "dense", "headwise")
    assert dense["cache"] == TOKEN * 900 <= headwise["cache"]
    assert all(
        row["predicted"] > 0 and row["peak"] >= row["passing"] >= 0 for row in (dense, headwise)
    )


@pytest.mark.slow
def test_peak_memory_of_a_method_is_that_of_a_process_of_its_own(searched):
    spec = str(searched / "tiny")
    loaded = load_model(spec, dtype="float32")
    artifact, arrays = artifacts.load_pair(searched / "cfg.yaml")
    method = Methods(loaded, artifact, arrays).make("headwise", 900)
    peak = peak_of(loaded, method, 900, spec=spec, revision=None)
    assert peak >= TOKEN * 900 // 2
