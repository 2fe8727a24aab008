"""Predicted seconds are brought to what a model's own layers take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import search.attention_time
from kernels.patterns import make
from profiling.models.loading import load_model
from profiling.prompts.prompt import make_prompts
from search.attention_time import fit_to_layers, line_through, measured_seconds, one_of_each_task
from search.curves import Curves
from tests.search.problems import problem_of

CANDIDATES = (*(make("block_sparse", blocks=blocks) for blocks in (2, 4, 8)), make("dense"))
COSTS = np.tile(np.array([1.0, 2.0, 4.0, 8.0]), (2, 3, 1))
CURVES = Curves(change=8 - COSTS, error=8 - COSTS, recall=COSTS / 8, tiles=COSTS)


def test_a_line_is_found() -> None:
    predicted = np.array([0.2, 0.3, 0.6])
    assert line_through(predicted, 1.2 * predicted + 0.02) == pytest.approx((1.2, 0.02))
    # A measurement that is 10% off moves what is predicted of the others by less.
    factor, constant = line_through(predicted, (1.2 * predicted + 0.02) * np.array([1, 1.1, 1]))
    np.testing.assert_allclose(factor * predicted + constant, 1.2 * predicted + 0.02, rtol=0.08)


@pytest.mark.parametrize("measured", [(0.1, 0.25, 0.6), (0.4, 0.3, 0.2), (0.3,) * 3, (0.001, 0.01, 2)])
def test_neither_part_of_a_line_is_below_0_and_sizes_are_not_free(measured: tuple[float, ...]) -> None:
    predicted = np.array([0.2, 0.3, 0.6])
    ratio = predicted / np.array(measured)
    factor, constant = line_through(predicted, measured)
    assert factor >= 0.5 * ratio.sum() / (ratio**2).sum() * (1 - 1e-9) and constant >= 0


def test_of_one_measurement_all_is_a_factor_or_half_of_it() -> None:
    factor, constant = line_through([0.2] * 3, [0.3] * 3)
    assert factor * 0.2 + constant == pytest.approx(0.3) and factor >= 0.75


def test_what_layers_add_is_found_from_several_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(CURVES, COSTS, total=12.0, candidates=CANDIDATES)
    asked: list[tuple[float, ...]] = []

    def measured(loaded: Any, problem: Any, settlements: Any, prompts: Any, *, backend: str) -> list[float]:
        asked.append(tuple(settlement.cost for settlement in settlements))
        return [1.5 * settlement.cost + 6 * 0.25 for settlement in settlements]

    monkeypatch.setattr(search.attention_time, "measured_seconds", measured)
    assert fit_to_layers(None, problem, [], backend="auto") == pytest.approx((1.5, 0.25))  # type: ignore[arg-type]
    # Half of it, all of it, twice of it, and one for each head.
    assert asked == [(6.0, 12.0, 24.0, 12.0)]


def test_seconds_are_means_over_prompts_of_unlike_tasks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(str(tiny_model), dtype="float32")
    prompts = [
        p for task in ("passkey", "prose") for p in make_prompts(task, loaded.tokenizer, length=256, samples=2, seed=0)
    ]
    chosen = one_of_each_task(prompts, 2)
    assert chosen == [prompts[0], prompts[2]]
    assert one_of_each_task(prompts * 3, 2) == [prompts[0], prompts[2], prompts[0]]
    layers, heads = loaded.model.config.num_hidden_layers, loaded.model.config.num_attention_heads
    costs = np.tile(COSTS[:1, :1], (layers, heads, 1))
    curves = Curves(change=8 - costs, error=8 - costs, recall=costs / 8, tiles=costs)

    class Sized:
        num_kv_heads = loaded.model.config.num_key_value_heads

    problem = problem_of(curves, costs, total=float(4 * layers * heads), candidates=CANDIDATES)
    object.__setattr__(problem, "model", Sized)
    seconds = {0: 1.0, 2: 3.0}

    def attention(loaded: Any, prompt: Any, plans: Mapping[str, Any], *, backend: str) -> dict[str, float]:
        assert len(plans) == 2 and all(len(by_layer) == layers for by_layer in plans.values())
        taken = real(loaded, prompt, plans, backend=backend)
        assert all(value > 0 for value in taken.values())
        return {name: seconds[prompts.index(prompt)] * (1 + int(name)) for name in taken}

    real = search.attention_time.attention_seconds
    monkeypatch.setattr(search.attention_time, "attention_seconds", attention)
    settlements = [problem.settle({"share": share}) for share in (0.5, 1.0)]
    assert measured_seconds(loaded, problem, settlements, chosen, backend="auto") == [2.0, 4.0]
