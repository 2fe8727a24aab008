"""Seconds taken in turn, and speed-ups over the fastest dense baseline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from artifacts import HeadwiseError
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
from profiling.speed.latency import in_turn, interleaved, medians
from tests.profiling.conftest import tiny


@pytest.mark.parametrize(
    ("model", "kernel", "value", "by"),
    [
        ([8.0, 9.0, 8.0], [2.0, 2.0, 3.0], 2.0, KERNEL),
        ([1.0, 1.0, 1.0], [4.0, 5.0, 4.0], 1.0, MODEL),
    ],
)
def test_the_fastest_dense_baseline_is_the_one_that_less_is_gained_over(
    model: list[float], kernel: list[float], value: float, by: str
) -> None:
    seconds = {MODEL: model, KERNEL: kernel, "headwise": [1.0, 1.0, 1.0]}
    found = of_rounds(seconds, "headwise")
    assert (found.value, found.fastest) == (value, by)
    assert of_rounds(seconds, by).value == 1.0


def test_ratios_are_of_the_same_rounds() -> None:
    # A machine that slows down slows both of a round.
    seconds = {
        MODEL: [2.0, 20.0, 200.0],
        KERNEL: [4.0, 40.0, 400.0],
        "headwise": [1.0, 10.0, 100.0],
    }
    assert of_rounds(seconds, "headwise").over == {MODEL: 2.0, KERNEL: 4.0}


@pytest.mark.parametrize(
    ("dense", "own", "said"),
    [
        ([1.5, 2.0, 4.0, 1.5, 2.0, 4.0, 3.0], [1.0] * 7, "2.00 times as fast (1.50 to 4.00) as"),
        ([1.0] * 3, [2.0, 4.0, 1.25], "2.00 times SLOWER (1.25 to 4.00) than"),
        ([1.0] * 6, [0.8, 0.9, *[1.25] * 4], "(0.80 to 1.25, no difference beyond noise)"),
    ],
)
def test_a_speedup_is_told_with_its_interval(
    dense: list[float], own: list[float], said: str
) -> None:
    assert said in sentence(of_rounds({KERNEL: dense, "headwise": own}, "headwise"))


def test_both_dense_baselines_are_told() -> None:
    speedup = Speedup(over={MODEL: 8.0, KERNEL: 2.0})
    assert "2.00 times as fast as the fastest dense baseline, 8.00 times" in sentence(speedup)
    assert cells(speedup) == ("2.00x", "8.00x") and cells(None) == ("-", "-")
    assert cells(Speedup(over={KERNEL: 2.0})) == ("2.00x", "-")


def test_the_kernel_serves_where_it_is_asked_for() -> None:
    model, ids = tiny("llama"), torch.randint(0, 97, (1, 200))
    with torch.no_grad():
        with dense(model, MODEL):
            assert model.config._attn_implementation == "sdpa"
            expected = model(ids).logits
        with dense(model, KERNEL) as applied:
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
            assert applied.settings.calls.total()["dense by kernel"] == 3


def test_ratios_are_of_pairs() -> None:
    """A machine that gets slower and slower makes both slower."""
    those = [float(n) for n in range(1, 31)]
    ratio = ratio_of_pairs([1.02 * n for n in those], those)
    assert ratio.low == pytest.approx(1.02) and ratio.high == pytest.approx(1.02)
    assert ratio_of_pairs([2.0, 3.0], [1.0, 1.0]).low == 2.0


@pytest.mark.parametrize(("count", "low", "high"), [(8, 1, 8), (9, 2, 8), (40, 14, 27)])
def test_bounds_hold_the_median_as_often_as_they_say(count: int, low: int, high: int) -> None:
    """By the table of the sign test: of 8 the second and the seventh would hold it in 93% alone."""
    found = ratio_of_pairs([float(n) for n in range(1, count + 1)], [1.0] * count)
    assert (found.low, found.high) == (low, high)


def test_times_that_make_no_pairs() -> None:
    with pytest.raises(HeadwiseError, match="2 and 1 times cannot be paired"):
        ratio_of_pairs([1.0, 2.0], [1.0])


def test_interleaving_takes_turns_and_drops_the_first_round() -> None:
    order: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        order.append(name)
        yield

    ways = {name: partial(context, name) for name in ("a", "b")}
    seconds = interleaved(ways, lambda: None, repeats=3, device="cpu")
    assert order == ["a", "b"] * 4
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}


def test_a_rehearsal_is_one_timed_round() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}  # type: ignore[misc]
    for repeats, warm_up, rounds in ((0, True, 1), (2, True, 3), (2, False, 2)):
        calls.clear()
        seconds = in_turn(runs, repeats=repeats, device="cpu", warm_up=warm_up)
        assert calls == ["a", "b"] * rounds and len(seconds["a"]) == max(repeats, 1)
