"""Spending a budget: the best there is for what it uses."""

import itertools

import numpy as np
import pytest

from artifacts import HeadwiseError
from search.allocate import allocate, spend

SIZES = (0.0625, 0.125, 0.25, 0.5, 1.0)


def _costs(parts: int, seed: int, convex: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drops = rng.exponential(size=(parts, len(SIZES) - 1)) * rng.exponential(size=(parts, 1))
    if convex:
        steps = np.diff(SIZES)
        drops = -np.sort(-drops / steps, axis=1) * steps
    return np.concatenate([np.zeros((parts, 1)), -np.cumsum(drops, axis=1)], axis=1) + 10


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("convex", [True, False])
def test_it_is_the_best_for_some_price(seed: int, convex: bool) -> None:
    """Everett's condition: where every step fits in turn, no choice that is as small costs less."""
    costs = _costs(4, seed, convex)
    choices = list(itertools.product(range(len(SIZES)), repeat=4))
    sizes = [sum(SIZES[place] for place in choice) for choice in choices]
    total_costs = [sum(costs[part, place] for part, place in enumerate(choice)) for choice in choices]
    price = float(np.random.default_rng(seed).exponential())
    # The least of cost + price * size is on the hulls; a total of its size must lead to it.
    best = min(range(len(choices)), key=lambda at: total_costs[at] + price * sizes[at])
    assert tuple(allocate(costs, SIZES, sizes[best])) == choices[best]


def test_convex_curves_are_followed_exactly_in_equal_steps() -> None:
    sizes = (1, 2, 3, 4, 5)
    rng = np.random.default_rng(0)
    for _ in range(50):
        drops = -np.sort(-rng.exponential(size=(4, 4)), axis=1)
        costs = np.concatenate([np.zeros((4, 1)), -np.cumsum(drops, axis=1)], axis=1)
        total = int(rng.integers(4, 21))
        best = min(
            sum(costs[part, place] for part, place in enumerate(choice))
            for choice in itertools.product(range(5), repeat=4)
            if sum(sizes[place] for place in choice) <= total
        )
        at = allocate(costs, sizes, total)
        assert sum(costs[part, place] for part, place in enumerate(at)) == pytest.approx(best)


def test_what_needs_little_gives_room_to_what_needs_much() -> None:
    flat, steep = [1.0, 1.0, 1.0, 1.0, 1.0], [9.0, 7.0, 5.0, 3.0, 1.0]
    assert allocate(np.array([flat, steep]), SIZES, 1.1) == [0, 4]


def test_a_dent_in_a_curve_is_stepped_over() -> None:
    costs = np.array([[10.0, 9.9, 1.0, 0.9, 0.0]])
    assert allocate(costs, SIZES, 0.2) == [0]
    assert allocate(costs, SIZES, 0.25) == [2]


def test_too_small_a_total_is_refused() -> None:
    with pytest.raises(HeadwiseError, match=r"a total of 0.1 is too small for 2 parts: the least is 0.125"):
        allocate(np.zeros((2, 5)), SIZES, 0.1)


def test_parts_may_have_sizes_of_their_own() -> None:
    costs = np.array([[8.0, 4.0, 0.0], [8.0, 4.0, 0.0]])
    sizes = np.array([[1.0, 2.0, 3.0], [1.0, 5.0, 9.0]])
    assert allocate(costs, sizes, 4.0) == [2, 0]
    assert allocate(costs, sizes, 12.0) == [2, 2]
    with pytest.raises(HeadwiseError, match="the least is 2"):
        allocate(costs, sizes, 1.9)


def test_sizes_need_not_ascend() -> None:
    costs = np.array([[0.0, 4.0, 8.0]])
    assert allocate(costs, np.array([[3.0, 2.0, 1.0]]), 2.5) == [1]


def test_what_costs_infinitely_much_is_not_taken() -> None:
    costs = np.array([[np.inf, 4.0, 1.0], [5.0, np.inf, 0.0]])
    assert allocate(costs, (1, 2, 3), 3.0) == [1, 0]
    assert allocate(costs, (1, 2, 3), 6.0) == [2, 2]


def test_the_price_is_what_the_dearest_step_taken_saved() -> None:
    costs = np.array([[8.0, 4.0, 3.0], [6.0, 3.0, 2.5]])
    assert spend(costs, (1, 2, 3), 2.0).price == np.inf
    assert spend(costs, (1, 2, 3), 4.0).price == pytest.approx(3.0)
    assert spend(costs, (1, 2, 3), 6.0).price == pytest.approx(0.5)


def test_of_entries_that_are_alike_the_last_is_taken() -> None:
    assert allocate(np.array([[5.0, 0.0, 0.0]]), (1, 2, 2), 2.0) == [2]
    assert allocate(np.array([[5.0, 0.0, 0.0]]), (1, 2, 3), 3.0) == [1]
