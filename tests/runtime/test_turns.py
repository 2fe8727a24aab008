"""Few new tokens on a past: by patterns or densely, whichever was found to be faster on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kernels.patterns import Dense, LayerPlan
from runtime import measured
from runtime.attention import turns
from runtime.attention.turns import Threshold, Turns
from tests.runtime.omnikv import CLOSE

PAST, NEW = 200, 90


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is known yet, and pasts of any length count."""
    monkeypatch.setattr(measured, "folder", lambda: tmp_path)
    monkeypatch.setattr(turns, "LEAST", 1)
    return tmp_path


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each measurement was of."""
    found: list[int] = []
    former = Turns.measure

    def measure(self: Turns, q: Tensor, k: Tensor, *ways: Any) -> Any:
        found.append(q.shape[2])
        return former(self, q, k, *ways)

    monkeypatch.setattr(Turns, "measure", measure)
    return found


def turn(model: Any, cache: Any, ids: Any, new: int = NEW) -> Tensor:
    """Logits of new tokens behind a past."""
    model(ids(PAST), past_key_values=cache, use_cache=True)
    logits: Tensor = model(ids(new, seed=1), past_key_values=cache, use_cache=True).logits
    return logits


@pytest.mark.parametrize("gained", [False, True])
def test_the_faster_way_serves_and_is_kept(
    gained: bool, folder: Path, timed: list[int], build: Any, apply: Any, masked: Any, ids: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(turns, "_MARGIN", float("inf") if gained else 0.0)
    model = build()
    with masked(model):
        sparse = turn(model, DynamicCache(config=model.config), ids)
    for times in (2, 0):
        timed.clear()
        with apply(model, backend="auto", strict=True) as handle:
            found = turn(model, handle.new_cache(), ids)
            stats = handle.stats()
            turn(model, handle.new_cache(), ids)
        # Once for each of two layers, and not again by another application.
        assert timed == [NEW] * times
        assert stats["sparse"] == (4 if gained else 2)
        assert stats["dense"].get("short", 0) == (0 if gained else 2)
        assert torch.allclose(found, sparse, **CLOSE) == gained
    kept = [json.loads(file.read_text()) for file in folder.iterdir()]
    assert kept == [{"loses": 0, "gains": 2} if gained else {"loses": 2, "gains": turns.MOST // 64}] * 2


def test_caches_of_eight_bits_have_thresholds_of_their_own(folder: Path) -> None:
    some = Turns(LayerPlan([Dense()], 1))
    q, k = torch.zeros(1, 1, NEW, 8), torch.zeros(1, 1, PAST + NEW, 8)
    lengths = NEW, PAST + NEW
    assert some.gains(q, k, *lengths) is None
    some.measure(q, k, lengths, lambda: q, lambda: q)
    assert some.gains(q, k, *lengths) is not None
    assert some.gains(q, k.to(torch.float8_e4m3fn), *lengths) is None


def test_sequences_alike_are_measured_together_by_their_own_lengths(
    folder: Path, timed: list[int], build: Any, apply: Any, ids: Any
) -> None:
    """Padding alike is no key of anybody; sequences unlike wait for what others find out."""
    model = build()

    def serve(skipped: tuple[int, int]) -> None:
        real = torch.ones(2, PAST + NEW, dtype=torch.long)
        for row, count in enumerate(skipped):
            real[row, :count] = 0
        with apply(model, backend="auto") as handle:
            cache = handle.new_cache()
            model(ids(PAST, batch=2), attention_mask=real[:, :PAST], past_key_values=cache, use_cache=True)
            model(ids(NEW, batch=2), attention_mask=real, past_key_values=cache, use_cache=True)

    serve((3, 7))
    assert not timed and not any(folder.iterdir())
    # 256 keys are another power of two than the 290 slots.
    for _ in range(2):
        serve((PAST + NEW - 255,) * 2)
    assert timed == [NEW] * 2


def test_whole_prompts_long_chunks_and_the_reference_are_not_measured(
    folder: Path, timed: list[int], build: Any, apply: Any, ids: Any, monkeypatch: Any
) -> None:
    model = build()
    with apply(model, backend="auto") as handle:
        model(ids(PAST), past_key_values=handle.new_cache(), use_cache=True)
        monkeypatch.setattr(turns, "MOST", NEW)
        turn(model, handle.new_cache(), ids)
        assert handle.stats()["sparse"] == 6
    monkeypatch.undo()
    with apply(model) as handle:
        turn(model, handle.new_cache(), ids)
        assert handle.stats()["sparse"] == 4
    assert not timed and not any(folder.iterdir())


def test_a_threshold_closes_in_on_what_it_learns() -> None:
    threshold = Threshold()
    assert threshold.verdict(64) is None and threshold.verdict(turns.MOST) is True
    threshold.learn(130, False)
    threshold.learn(1000, True)
    assert [threshold.verdict(n) for n in (64, 192, 193, 960, 961)] == [False, False, None, None, True]
    threshold.learn(500, True)
    assert [threshold.verdict(n) for n in (192, 400, 449)] == [False, None, True]
    # The latest measurement is believed.
    threshold.learn(600, False)
    assert [threshold.verdict(n) for n in (600, 640, 641)] == [False, False, True]


@pytest.mark.parametrize("text", ["", "[1]", '{"loses": "many"}', '{"gains": 3}'])
def test_a_file_that_says_nothing_is_measured_again(
    text: str, folder: Path, timed: list[int], build: Any, apply: Any, ids: Any
) -> None:
    model = build()
    for _ in range(2):
        with apply(model, backend="auto") as handle:
            turn(model, handle.new_cache(), ids)
        for file in folder.iterdir():
            file.write_text(text)
    assert timed == [NEW] * 4
