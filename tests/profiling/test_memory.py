"""Memory of a prefill, predicted from a configuration and measured in processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from artifacts import HeadwiseError
from profiling import memory
from profiling.memory_use.plan import plan, read_shape

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


def test_an_8b_shape_counted_by_hand() -> None:
    shape, length = read_shape(json.dumps(LLAMA), "bfloat16"), 2**19
    plain = plan(shape, length, growing=False)
    assert shape.parameters == 8_030_261_248
    # 32 layers of 8 heads of 128 keys and as many values, two bytes each, 2**19 times.
    assert plain.cache == 64 * GIB and plain.bank == 0
    # Four hidden states of 4 GiB and three times the width of the MLP, 3.5 hidden states each.
    assert plain.passing == pytest.approx((4 + 3 * 3.5) * 4 * GIB, rel=0.01)
    assert plan(shape, length).cache == 72 * GIB


def test_banked_layers_are_in_cpu_memory() -> None:
    shape = read_shape(json.dumps(LLAMA), "bfloat16")
    found = plan(shape, 2**20, banked=27, growing=False)
    assert (found.cache, found.bank) == (5 * 4 * GIB, 27 * 4 * GIB)
    assert found.device == found.weights + found.cache + found.passing


def test_layers_that_slide_keep_a_window() -> None:
    gemma = LLAMA | {"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18}
    gemma |= {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512}
    shape = read_shape(json.dumps(gemma), "bfloat16")
    token = 2 * 256 * 2
    assert (shape.layers, shape.sliding) == (18, 15)
    assert plan(shape, 10_000, growing=False).cache == token * (3 * 10_000 + 15 * 512)


def test_the_command_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert (
        memory.main(["--plan", str(tmp_path), "--length", "131072", "524288", "--memory", "139GB"])
        == 0
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [(line[0], line[-1]) for line in lines] == [("131072", "yes"), ("524288", "no")]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("nowhere", "no shape in"),
        ('{"model_type": "nothing"}', "is no configuration of transformers"),
        ('{"model_type": "clip"}', "no memory can be predicted from this CLIPConfig"),
    ],
)
def test_what_is_no_shape_of_a_model(plan: str, said: str) -> None:
    with pytest.raises(HeadwiseError, match=said):
        memory.main(["--plan", plan, "--length", "1024"])


@pytest.mark.slow
def test_memory_by_length_is_measured_beside_what_was_predicted(
    searched: Path, tmp_path: Path
) -> None:
    command = f"--model {searched}/tiny {searched}/cfg.yaml --dtype float32 --dense".split()
    memory.main([*command, "--length", "4096", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["length"], row["method"]) for row in rows] == [(4096, "dense"), (4096, "headwise")]
    assert all(row["predicted"] > 0 and row["peak"] >= row["passing"] >= 0 for row in rows)
    # 3 layers of 2 heads of 16 numbers of 4 bytes, twice.
    assert rows[0]["cache"] == 3 * 2 * 16 * 4 * 2 * 4096 <= rows[1]["cache"]
