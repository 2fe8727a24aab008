"""A speed-up is against the fastest dense baseline, wherever it is told."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiling.speed.baselines import (
    KERNEL,
    MODEL,
    Speedup,
    cells,
    dense,
    of_rounds,
    rows,
    sentence,
)


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


def test_a_speedup_is_told_with_its_interval() -> None:
    rounds = [1.5, 2.0, 4.0, 1.5, 2.0, 4.0, 3.0]
    fast = sentence(of_rounds({KERNEL: rounds, "headwise": [1.0] * 7}, "headwise"))
    assert fast == "2.00 times as fast (1.50 to 4.00) as the fastest dense baseline"
    slow = sentence(of_rounds({KERNEL: [1.0] * 3, "headwise": [2.0, 4.0, 1.25]}, "headwise"))
    assert slow == (
        "2.00 times SLOWER (1.25 to 4.00) than the fastest dense baseline; of 3 rounds, "
        "too few for an interval of 95%, the least and the most"
    )
    alike = sentence(
        of_rounds({KERNEL: [1.0] * 6, "headwise": [0.8, 0.9, 1.25, 1.25, 1.25, 1.25]}, "headwise")
    )
    assert alike == (
        "0.80 times as fast (0.80 to 1.25, no difference beyond noise) "
        "as the fastest dense baseline"
    )


def test_words_name_both_and_say_slower() -> None:
    found = Speedup(over={MODEL: 8.0, KERNEL: 2.0})
    fast = sentence(found)
    assert fast == (
        "2.00 times as fast as the fastest dense baseline, 8.00 times as "
        "fast as default attention (sdpa)"
    )
    slow = sentence(Speedup(over={MODEL: 0.5, KERNEL: 2.0}))
    assert slow == (
        "2.00 times SLOWER than the fastest dense baseline, 2.00 times "
        "SLOWER than default attention (sdpa)"
    )
    assert cells(found) == ("2.00x", "8.00x") and cells(None) == ("-", "-")
    assert cells(Speedup(over={KERNEL: 2.0})) == ("2.00x", "-")
    assert [line.split("  ")[1] for line in rows({MODEL: 1.0, KERNEL: 2.0, "headwise": 3.0})] == [
        "default attention (sdpa)",
        "dense by Headwise's kernel",
        "Headwise, index builds included",
    ]


def test_the_kernel_serves_where_it_is_asked_for() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(0, 64, (1, 200))
    with torch.no_grad():
        with dense(model, MODEL):
            assert model.config._attn_implementation == "sdpa"
            expected = model(ids).logits
        with dense(model, KERNEL) as applied:
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
            assert applied.settings.calls.total()["dense by kernel"] == 2
