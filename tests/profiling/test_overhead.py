"""python -m profiling.overhead: every figure is there, on a tiny model, and ratios are of pairs."""

from __future__ import annotations

import json

import pytest
import torch

from artifacts import HeadwiseError
from profiling import overhead
from profiling.models.loading import LoadedModel
from profiling.speed.ratios import ratio_of_pairs
from tests.profiling.conftest import tiny


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(model=tiny("llama"), tokenizer=None, name="tiny", revision=None)
    monkeypatch.setattr(overhead, "load_model", lambda *args, **kwargs: loaded)
    monkeypatch.setattr("profiling.speed.python_time._ROUNDS", 2)
    monkeypatch.setattr("profiling.speed.python_time._CALLS", 2)
    monkeypatch.setattr(overhead, "_VOCABULARY", 97)


def test_every_figure_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        lengths = ["--length", "20", "300", "--beside", "100", "200"]
        assert overhead.main([*lengths, "--repeats", "2", "--threads", "1", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert [(row["what"], row["tokens"]) for row in found["rows"]] == [
        (what, tokens) for tokens in (20, 300) for what in ("prefill", "decode")
    ]
    for row in found["rows"]:
        assert row["plain_s"] > 0
        assert set(row["ratios"]) == ({"applied", "by kernel"} if row["what"] == "decode" else {"applied"})
        assert all(0 < ratio["low"] <= ratio["value"] <= ratio["high"] for ratio in row["ratios"].values())
    assert [part["what"] for part in found["python"]] == [
        "sdpa, no artifact",
        "by kernel",
        "sdpa",
        "sparse prefill",
    ]
    assert all(part["microseconds"] > 0 and part["own"] >= 0 for part in found["python"])
    assert [one["tokens"] for one in found["beside"]] == [100, 200]
    assert all(0 < one["linear_s"] < one["seconds"] for one in found["beside"])


@pytest.mark.parametrize("name", ["repeats", "threads", "length", "beside"])
def test_sizes_that_are_none(name: str) -> None:
    with pytest.raises(HeadwiseError, match=f"--{name} must be at least 1, got 0"):
        overhead.main([f"--{name}", "0"])


def test_ratios_are_of_pairs() -> None:
    """A machine that gets slower and slower makes both slower."""
    those = [float(n) for n in range(1, 31)]
    ratio = ratio_of_pairs([1.02 * n for n in those], those)
    assert ratio.low == pytest.approx(1.02) and ratio.high == pytest.approx(1.02)
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(200):
        noisy = (1.1 * torch.randn(40, generator=generator).mul(0.1).exp()).tolist()
        found = ratio_of_pairs(noisy, [1.0] * 40)
        held += found.low <= 1.1 <= found.high
    assert 180 <= held <= 199
    assert ratio_of_pairs([2.0, 3.0], [1.0, 1.0]).low == 2.0


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (20, 6, 15), (40, 14, 27)])
def test_bounds_hold_the_median_as_often_as_they_say(count: int, low: int, high: int) -> None:
    """By the table of the sign test: of 8 the second and the seventh would hold it in 93% alone."""
    found = ratio_of_pairs([float(n) for n in range(1, count + 1)], [1.0] * count)
    assert (found.low, found.high) == (low, high)


def test_times_that_make_no_pairs() -> None:
    with pytest.raises(HeadwiseError, match="2 and 1 times cannot be paired"):
        ratio_of_pairs([1.0, 2.0], [1.0])
