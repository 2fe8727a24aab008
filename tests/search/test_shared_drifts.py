"""Drifts on whole prompts that processes measure together: each once, and the same as by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import search.shared_drifts
from kernels.patterns import make
from profiling.quality.logits import Drift
from search.curves import Curves
from search.settle import Settlement
from search.shared_drifts import SharedDrifts
from search.storage import open_storage
from search.units import Units
from tests.search.problems import Formula, problem_of

CANDIDATES = (*(make("block_sparse", blocks=blocks) for blocks in (2, 4, 8)), make("dense"))
COSTS = np.tile(np.array([1.0, 2.0, 4.0, 8.0]), (2, 3, 1))
CURVES = Curves(change=8 - COSTS, error=8 - COSTS, recall=COSTS / 8, tiles=COSTS)
PROMPTS: Any = (10, 20, 30)


class Noted(Formula):
    """Every measurement is noted; a prompt's drift tells which one it is."""

    def drift(self, model: Any, logits: Any, settlement: Settlement, *, which: Sequence[int] | None = None) -> Drift:
        assert which is not None and len(which) == 1 and which[0] in logits.known
        model.append((settlement.cost, which[0]))
        kl = np.full(2, settlement.cost + logits.prompts[which[0]])
        return Drift(kl=kl, loss=kl, dense_loss=np.array([0, np.nan]))


class Logits:
    def __init__(self, model: Any, prompts: Any, *, at_once: bool) -> None:
        self.prompts, self.known = prompts, set()

    def learn(self, i: int) -> bool:
        self.known.add(i)
        return True


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> Noted:
    monkeypatch.setattr(search.shared_drifts, "DenseLogits", Logits)
    plain = problem_of(CURVES, COSTS, total=24.0, candidates=CANDIDATES)
    return Noted(**vars(plain))


def process_on(problem: Noted, folder: Path) -> tuple[SharedDrifts, list[tuple[float, int]]]:
    """What a process of its own sees, and what it measures."""
    storage, measured = open_storage(None, folder / "cfg.yaml"), []

    def units(keys: Sequence[str]) -> Units:
        return Units(storage, "drifts", keys, {})

    return SharedDrifts(problem, measured, PROMPTS, units), measured


def test_every_settlement_is_measured_on_every_prompt_once(problem: Noted, tmp_path: Path) -> None:
    drifts, measured = process_on(problem, tmp_path)
    small, large = problem.settle({"share": 0.5}), problem.settle({"share": 1.0})
    first, second, again = drifts([small, large, small])
    np.testing.assert_array_equal(first.kl, np.repeat(np.array(PROMPTS), 2) + small.cost)
    np.testing.assert_array_equal(second.loss, np.repeat(np.array(PROMPTS), 2) + large.cost)
    np.testing.assert_array_equal(first.dense_loss, [0, np.nan] * 3)
    np.testing.assert_array_equal(again.kl, first.kl)
    # Prompt by prompt: dense predictions of one are enough for a while.
    assert [place for _, place in measured] == [0, 0, 1, 1, 2, 2]
    dear = problem.settle({"share": 1.5})
    drifts([large, dear])
    assert measured[6:] == [(dear.cost, place) for place in range(3)]
    other, none = process_on(problem, tmp_path)
    np.testing.assert_array_equal(other([dear])[0].kl, drifts([dear])[0].kl)
    assert none == []


def test_a_second_process_begins_with_another_prompt(problem: Noted, tmp_path: Path) -> None:
    settlements = [problem.settle({"share": share}) for share in (0.5, 1.0, 1.5)]
    second, by_second = process_on(problem, tmp_path)
    taken: list[list[tuple[float, int]]] = []

    class Interrupting(Noted):
        def drift(self, model: Any, logits: Any, settlement: Settlement, **which: Any) -> Drift:
            # Once the first process has a unit in hand, the other one comes and does all that is left.
            if not taken:
                taken.append(by_second)
                with pytest.raises(InterruptedError):
                    second(settlements)
            return super().drift(model, logits, settlement, **which)

    first, by_first = process_on(Interrupting(**vars(problem)), tmp_path)
    second._units = _stop_when_waiting(second._units)
    drifts = first(settlements)
    assert len(by_first) == 1 and len(by_second) == 8
    assert by_first[0][1] == 0 and by_second[0][1] == 1
    assert [place for _, place in by_second] == [1, 1, 1, 2, 2, 2, 0, 0]
    assert all(len(drift.kl) == 6 for drift in drifts)


def _stop_when_waiting(units_of: Any) -> Any:
    """Units that raise InterruptedError where only what others have in hand is left."""

    def units(keys: Sequence[str]) -> Units:
        made = units_of(keys)
        claim = made.claim

        def stop() -> bool:
            raise InterruptedError

        made.claim = lambda **options: claim(**options, idle=stop)
        return made

    return units
