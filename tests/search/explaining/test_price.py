"""The price in a sidecar: heads that choose by it spend no more than the budget that the search had."""

from __future__ import annotations

import numpy as np
import pytest

from search.explaining.findings import at_price
from search.model.hulls import spend


@pytest.mark.parametrize("seed", range(40))
def test_choosing_by_the_recorded_price_spends_no_more_than_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, candidates = 30, 9
    costs = np.sort(rng.uniform(0.1, 1.0, (heads, candidates)), axis=-1)
    # Falling losses, some of them steep and some nearly flat, as heads have them.
    losses = np.sort(rng.uniform(0, 1, (heads, candidates)) ** rng.uniform(1, 6, (heads, 1)), axis=-1)[:, ::-1]
    total = float(rng.uniform(1.05, 3.0)) * float(costs[:, 0].sum())
    spent = spend(losses, costs, total)
    assert spent.price > 0
    # As a sidecar has them.
    kept, cost = losses.astype(np.float32), costs.astype(np.float32)
    chosen = [at_price(kept[head].tolist(), cost[head].tolist(), spent.price) for head in range(heads)]
    paid = float(costs[np.arange(heads), chosen].sum())
    assert paid <= total
    # And no more than a step less: half of the price would spend beyond it or take every step there is.
    assert paid >= 0.5 * total or paid >= float(costs[np.arange(heads), spent.entries].sum()) - costs.max()
    assert all(a <= b for a, b in zip(chosen, spent.entries, strict=True))


def test_a_tie_takes_the_cheaper() -> None:
    assert at_price([1.0, 0.5, 0.4], [1.0, 2.0, 3.0], 0.5) == 0
    assert at_price([1.0, 0.5, 0.4], [1.0, 2.0, 3.0], 0.499) == 1
    assert at_price([1.0, 0.5, 0.4], [1.0, 2.0, 3.0], 0.0) == 2
