"""headwise bench: no speed of a wrong result, and speed-ups over the fastest dense baseline."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from artifacts import HeadwiseError
from headwise.__main__ import main
from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan, make
from profiling.speed import attention_speed
from profiling.speed.attention_speed import Size
from profiling.speed.baselines import (
    KERNEL,
    MODEL,
    Speedup,
    cells,
    dense,
    of_rounds,
    ratio_of_pairs,
    sentence,
)
from profiling.speed.latency import medians, time_calls
from tests.profiling.conftest import tiny

SIZE = Size(length=70, head_dim=64, heads=2, kv_heads=1, dtype="float32", device="cpu")


def test_bench_of_a_wrong_result_prints_no_speed(monkeypatch, capsys):
    def slightly_off(*tensors, **options):
        return sparse_attention(*tensors, **options) * 1.1

    monkeypatch.setattr(attention_speed, "sparse_attention", slightly_off)
    options = ["--length", "256", "--head-dims", "64", "--repeats", "1"]
    with pytest.raises(HeadwiseError, match=r"headwise .*error"):
        main(["bench", *options, "--dtype", "float32"])
    assert "a_shape" not in capsys.readouterr().out


def test_bench_table_equals_its_record(tmp_path, capsys):
    out = tmp_path / "bench.json"
    words = "--length 200 --head-dims 64 --repeats 1 --dtype float32 --json"
    main(["bench", *words.split(), str(out)])
    record = json.loads(out.read_text())
    lines = record["lines"]
    patterns = ["a_shape", "vertical_slash", "block_sparse", "dense"]
    assert [line["pattern"] for line in lines] == patterns
    assert all(line["length"] == 200 for line in lines)
    assert lines[3]["density"] == 1.0 and record["environment"]["device"]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 4
    for text, line in zip(printed[2:], lines, strict=True):
        took = line["sparse_seconds"] + line["build_seconds"]
        over = [line[name] / took for name in ("sdpa_seconds", "kernel_seconds")]
        shown = [f"{min(over):.2f}x", f"{over[0]:.2f}x"]
        assert shown == [word for word in text.split() if word.endswith("x")][:2]


def test_bench_paper_sizes_are_minferences(tmp_path):
    out = tmp_path / "bench.json"
    words = f"--length 100 --head-dims 64 --repeats 1 --paper-sizes --json {out}"
    main(["bench", *words.split()])
    lines = json.loads(out.read_text())["lines"]
    assert [line["sizes"].get("slash") for line in lines] == [None, 6096, None]


def test_bench_inputs_have_near_keys_and_heavy_columns():
    q, k, _ = attention_speed.inputs(replace(SIZE, length=4096))
    plan = LayerPlan([make("vertical_slash", vertical=128, slash=100)] * 2, 1)
    scattered = plan.build(torch.randn_like(q), torch.randn_like(k))
    assert (plan.build(q, k).density() < 0.7 * scattered.density()).all()


@pytest.mark.parametrize(
    ("model", "kernel", "value", "by"),
    [
        ([8.0, 9.0, 8.0], [2.0, 2.0, 3.0], 2.0, KERNEL),
        ([1.0, 1.0, 1.0], [4.0, 5.0, 4.0], 1.0, MODEL),
    ],
)
def test_of_rounds_speedup_is_over_the_fastest_baseline(model, kernel, value, by):
    seconds = {MODEL: model, KERNEL: kernel, "headwise": [1.0, 1.0, 1.0]}
    result = of_rounds(seconds, "headwise")
    assert (result.value, result.fastest) == (value, by)
    assert of_rounds(seconds, by).value == 1.0


def test_of_rounds_ratios_are_within_rounds():
    # A machine that slows down slows both of a round.
    own = [float(n) for n in range(1, 31)]
    seconds = {MODEL: [2 * n for n in own], KERNEL: [4 * n for n in own], "headwise": own}
    result = of_rounds(seconds, "headwise")
    assert result.over == {MODEL: 2.0, KERNEL: 4.0}
    assert result.bounds == {MODEL: (2.0, 2.0), KERNEL: (4.0, 4.0)}


@pytest.mark.parametrize(
    ("dense", "own", "said"),
    [
        ([1.5, 2.0, 4.0, 1.5, 2.0, 4.0, 3.0], [1.0] * 7, "2.00 times as fast (1.50 to 4.00) as"),
        ([1.0] * 3, [2.0, 4.0, 1.25], "2.00 times SLOWER (1.25 to 4.00) than"),
        ([1.0] * 6, [0.8, 0.9, *[1.25] * 4], "(0.80 to 1.25, no difference beyond noise)"),
    ],
)
def test_sentence_has_the_interval_of_a_speedup(dense, own, said):
    assert said in sentence(of_rounds({KERNEL: dense, "headwise": own}, "headwise"))


def test_sentence_and_cells_have_both_baselines():
    speedup = Speedup(over={MODEL: 8.0, KERNEL: 2.0})
    assert "2.00 times as fast as the fastest dense baseline, 8.00 times" in sentence(speedup)
    assert cells(speedup) == ("2.00x", "8.00x") and cells(None) == ("-", "-")
    assert cells(Speedup(over={KERNEL: 2.0})) == ("2.00x", "-")


def test_dense_selects_the_kernel_or_the_model():
    model, ids = tiny("Llama"), torch.randint(0, 97, (1, 200))
    with torch.no_grad():
        with dense(model, MODEL):
            assert model.config._attn_implementation == "sdpa"
            expected = model(ids).logits
        with dense(model, KERNEL) as applied:
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
            assert applied.settings.calls.total()["dense by kernel"] == 3


@pytest.mark.parametrize(("count", "low", "high"), [(2, 1, 2), (8, 1, 8), (9, 2, 8), (40, 14, 27)])
def test_ratio_of_pairs_bounds_equal_the_sign_test(count, low, high):
    """By the table of the sign test: of 8 the second and the seventh would hold it in 93% alone."""
    result = ratio_of_pairs([float(n) for n in range(1, count + 1)], [1.0] * count)
    assert (result.low, result.high) == (low, high)


def test_ratio_of_pairs_refuses_unequal_counts():
    with pytest.raises(HeadwiseError, match="2 and 1"):
        ratio_of_pairs([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("repeats", "warm_up", "rounds"), [(3, True, 4), (0, True, 1), (2, False, 2)]
)
def test_time_calls_drops_a_warm_up_round_of_several(repeats, warm_up, rounds):
    calls = []

    @contextmanager
    def context(name):
        calls.append(f"in {name}")
        yield

    contexts = {name: partial(context, name) for name in "ab"}
    runs = {name: partial(calls.append, name) for name in "ab"}
    seconds = time_calls(runs, contexts=contexts, repeats=repeats, device="cpu", warm_up=warm_up)
    assert calls == ["in a", "a", "in b", "b"] * rounds
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys(
        "ab", max(repeats, 1)
    )


def test_medians_of_times():
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}
