"""headwise bench: baselines of the same attention, and no speed of a wrong result."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.decode import Decoded, decode_attention
from kernels.patterns import LayerPlan, make
from profiling import bench
from profiling.speed import attention_speed, decode_speed
from profiling.speed.config import Size
from profiling.speed.decode_speed import DECODE_HEADER, decode_cells, measure_decode

SIZE = Size(length=70, head_dim=64, heads=2, kv_heads=1, dtype="float32", device="cpu")


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
    q, k, v = attention_speed.inputs(replace(SIZE, past=130))
    assert (q.shape[2], k.shape[2], v.shape[2]) == (70, 200, 200)
    index = LayerPlan([make("dense")] * 2, 1).build(q, k)
    (run,) = attention_speed._dense(q, k, v).values()
    torch.testing.assert_close(run(), sparse_attention(q, k, v, index), atol=1e-4, rtol=1e-4)


def test_inputs_have_near_keys_and_heavy_columns() -> None:
    q, k, _ = attention_speed.inputs(replace(SIZE, length=4096))
    plan = LayerPlan([make("vertical_slash", vertical=128, slash=100)] * 2, 1)
    scattered = plan.build(torch.randn_like(q), torch.randn_like(k))
    assert (plan.build(q, k).density() < 0.7 * scattered.density()).all()


def test_a_line_of_the_decode_table() -> None:
    speed = measure_decode(SIZE, chosen=35, repeats=1)
    assert speed.all_bytes == 2 * speed.chosen_bytes == 2 * 70 * 64 * 4
    assert all(value > 0 for value in asdict(speed).values())
    assert speed.dense_seconds <= speed.sdpa_seconds
    cells = decode_cells(SIZE, speed)
    assert len(cells) == len(DECODE_HEADER) and cells[:4] == ["70", "64", "2/1", "35"]


@pytest.mark.parametrize("wrong", ["", " in its scores"])
def test_a_wrong_decode_gets_no_speed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slightly_off(*tensors: Any, **options: Any) -> Decoded:
        out, lse, scores = decode_attention(*tensors, **options)
        if options.get("backend") == "reference":
            return Decoded(out, lse, scores)
        return Decoded(out, lse, scores * 1.5) if wrong else Decoded(out * 1.1, lse, scores)

    monkeypatch.setattr(decode_speed, "decode_attention", slightly_off)
    with pytest.raises(HeadwiseError, match=f"decode over all keys is wrong{wrong}: largest error"):
        measure_decode(SIZE, chosen=35, repeats=1)


def test_every_way_in_torch_is_the_same_attention() -> None:
    q, k, v = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 50, 64), torch.randn(1, 2, 50, 64)
    found = [run().reshape(1, 6, 1, 64) for run in decode_speed._in_torch(q, k, v).values()]
    assert len(found) == 3
    for out in found:
        torch.testing.assert_close(out, decode_attention(q, k, v).out, atol=1e-5, rtol=1e-5)
