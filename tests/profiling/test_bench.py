"""headwise bench: baselines of the same attention, and no speed of a wrong result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan, make
from profiling import bench
from profiling.speed import attention_speed


def test_a_wrong_result_gets_no_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slightly_off(*tensors, **options):
        return sparse_attention(*tensors, **options) * 1.1

    monkeypatch.setattr(attention_speed, "sparse_attention", slightly_off)
    options = ["attention", "--length", "256", "--head-dims", "64", "--repeats", "1"]
    with pytest.raises(HeadwiseError, match="headwise is wrong: largest error"):
        bench.main([*options, "--dtype", "float32"])
    assert "a_shape" not in capsys.readouterr().out


def test_table_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    asked = "attention --length 70 --past 200 --head-dims 64 --repeats 1 --dtype float32 --json"
    bench.main([*asked.split(), str(out)])
    record = json.loads(out.read_text())
    lines = record["lines"]
    patterns = ["a_shape", "vertical_slash", "block_sparse", "dense"]
    assert [line["pattern"] for line in lines] == patterns
    assert all((line["length"], line["past"]) == (70, 200) for line in lines)
    assert lines[3]["density"] == 1.0 and record["environment"]["device"]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 4
    for text, line in zip(printed[2:], lines, strict=True):
        took = line["sparse_seconds"] + line["build_seconds"]
        over = [line[name] / took for name in ("sdpa_seconds", "kernel_seconds")]
        shown = [f"{min(over):.2f}x", f"{over[0]:.2f}x"]
        assert shown == [word for word in text.split() if word.endswith("x")][:2]


def test_decode_and_sizes_of_the_paper(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    asked = f"--length 100 --head-dims 64 --repeats 1 --json {out}"
    bench.main(f"decode {asked} --chosen 64".split())
    (line,) = json.loads(out.read_text())["lines"]
    assert (line["length"], line["chosen"]) == (100, 64) and line["chosen_seconds"] > 0
    bench.main(f"attention {asked} --paper-sizes".split())
    lines = json.loads(out.read_text())["lines"]
    assert [line["sizes"].get("slash") for line in lines] == [None, 6096, None]


def test_torch_attends_to_the_past_and_causally_to_new_tokens() -> None:
    size = attention_speed.Size(
        length=70, past=130, head_dim=64, heads=2, kv_heads=1, dtype="float32", device="cpu"
    )
    q, k, v = attention_speed.inputs(size)
    assert (q.shape[2], k.shape[2], v.shape[2]) == (70, 200, 200)
    index = LayerPlan([make("dense")] * 2, 1).build(q, k)
    (run,) = attention_speed._dense(q, k, v).values()
    torch.testing.assert_close(run(), sparse_attention(q, k, v, index), atol=1e-4, rtol=1e-4)


def test_inputs_have_near_keys_and_heavy_columns() -> None:
    size = attention_speed.Size(
        length=4096, head_dim=64, heads=2, kv_heads=1, dtype="float32", device="cpu"
    )
    q, k, _ = attention_speed.inputs(size)
    index = LayerPlan([make("vertical_slash", vertical=128, slash=100)] * 2, 1).build(q, k)
    scattered = LayerPlan([make("vertical_slash", vertical=128, slash=100)] * 2, 1).build(
        torch.randn_like(q), torch.randn_like(k)
    )
    assert (index.density() < 0.7 * scattered.density()).all()
