"""Costs of candidates by tables written down here, scaled to a model's own layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from artifacts import HeadwiseError
from kernels.patterns import make
from search.model.cost_table import Cost, CostTable
from search.model.costs import Costs
from search.model.timed_costs import line_through
from tests.artifacts.conftest import build

MODEL = build().model.model_copy(update={"num_heads": 6, "head_dim": 16})
LENGTH = 1024
START = {"a_shape": 1e-4, "vertical_slash": 3e-4, "block_sparse": 2e-4, "dense": 1e-4}
CANDIDATES = (
    make("a_shape", sink=64, window=64),
    make("vertical_slash", vertical=64, slash=64, last_q=64),
)
ALL_TILES = 16 * 17 // 2


def linear_table(*, tiles: tuple[int, ...] = (10, 40, 136), factor: float = 1.0) -> CostTable:
    """A cost table of head dim 16 in fp32: for each kind a start, and 1 us a tile."""
    costs = [
        Cost(
            pattern=kind,
            dtype="float32",
            length=LENGTH,
            head_dim=16,
            heads=6,
            tiles=6 * count,
            seconds=6 * factor * (count * 1e-6 + start),
            dense_seconds=6 * factor * 2e-3,
        )
        for kind, start in START.items()
        for count in tiles
    ]
    return CostTable(device="Abacus 3000", costs=tuple(costs))


def measured(table: CostTable) -> Costs:
    return Costs.measured(table, MODEL, length=LENGTH, dtype="float32")


def test_flops_equal_those_of_the_tiles():
    costs = Costs.flops(MODEL, length=LENGTH, dtype="float32")
    tiles = np.array([[[10.0, np.nan]]])
    np.testing.assert_array_equal(costs.spent(CANDIDATES, tiles), tiles * 4 * 64 * 64 * 16)
    # Two products of 64 x 64 tiles, a multiplication and an addition for each of the head dim's
    # numbers.
    assert costs.all_keys() == ALL_TILES * 4 * 64 * 64 * 16
    assert costs.device is None


def test_seconds_follow_the_fit_of_the_kind():
    costs = measured(linear_table())
    seconds = costs.spent(CANDIDATES, np.array([[20.0, 50.0], [np.nan, np.nan]]))
    np.testing.assert_allclose(seconds[0], [1e-4 + 20e-6, 3e-4 + 50e-6])
    assert np.isnan(seconds[1]).all()
    assert costs.all_keys() == pytest.approx(1e-4 + ALL_TILES * 1e-6)


def test_seconds_beyond_measured_sizes_are_extrapolated():
    costs = measured(linear_table(tiles=(40, 80)))
    seconds = costs.spent(CANDIDATES[:1] * 3, np.array([20.0, 60.0, 160.0]))
    np.testing.assert_allclose(seconds, [1e-4 + 20e-6, 1e-4 + 60e-6, 2 * (1e-4 + 80e-6)])


def test_seconds_grow_with_estimated_queries():
    costs = measured(linear_table())
    few, many = (make("vertical_slash", vertical=64, slash=64, last_q=q) for q in (64, 256))
    seconds = costs.spent((few, many), np.array([50.0, 50.0]))
    # Three more rows of queries against all keys.
    assert seconds[1] - seconds[0] == pytest.approx(3 * 16 * costs.all_keys() / ALL_TILES)
    real = replace(costs, scale=2.0, overhead=1e-5)
    np.testing.assert_allclose(real.spent((few, many), np.array([50.0, 50.0])), 2 * seconds + 1e-5)
    assert real.all_keys() == pytest.approx(2 * costs.all_keys() + 1e-5)


def test_times_of_equal_tiles_are_averaged():
    """A table of several head counts lists the time of equal tiles more than once."""
    table = linear_table()
    both = replace(table, costs=table.costs + linear_table(factor=3.0).costs)
    costs = measured(both)
    seconds = costs.spent(CANDIDATES[:1] * 2, np.array([5.0, 50.0]))
    np.testing.assert_allclose(seconds, 2 * np.array([1e-4 + 5e-6, 1e-4 + 50e-6]))


def test_fit_recovers_a_line():
    predicted = np.array([0.2, 0.3, 0.6])
    assert line_through(predicted, 1.2 * predicted + 0.02) == pytest.approx((1.2, 0.02))
    # A measurement that is 10% off changes the other predictions by less.
    factor, constant = line_through(predicted, (1.2 * predicted + 0.02) * np.array([1, 1.1, 1]))
    np.testing.assert_allclose(factor * predicted + constant, 1.2 * predicted + 0.02, rtol=0.08)


@pytest.mark.parametrize(
    "measured", [(0.1, 0.25, 0.6), (0.4, 0.3, 0.2), (0.3,) * 3, (0.001, 0.01, 2)]
)
def test_fit_is_nonnegative_and_sizes_are_not_free(measured):
    predicted = np.array([0.2, 0.3, 0.6])
    ratio = predicted / np.array(measured)
    factor, constant = line_through(predicted, measured)
    assert factor >= 0.5 * ratio.sum() / (ratio**2).sum() * (1 - 1e-9) and constant >= 0


def test_fit_of_one_measurement_is_proportional_or_half_constant():
    factor, constant = line_through([0.2] * 3, [0.3] * 3)
    assert factor * 0.2 + constant == pytest.approx(0.3) and factor >= 0.75


def test_dense_seconds_scale_with_squared_length():
    at = {"head_dim": 16, "dtype": "float32"}
    assert linear_table().dense_seconds(length=LENGTH, heads=3, **at) == pytest.approx(6e-3)
    assert linear_table().dense_seconds(length=2 * LENGTH, heads=6, **at) == pytest.approx(48e-3)


def test_unknown_kind_error_lists_the_table():
    with pytest.raises(HeadwiseError, match=r"no tri with head dim 16 .*; it has: .*'dense'"):
        linear_table().line("tri", length=LENGTH, head_dim=16, dtype="float32")
    empty = replace(linear_table(), costs=())
    with pytest.raises(HeadwiseError, match="it has: nothing"):
        empty.line("dense", length=LENGTH, head_dim=16, dtype="float32")
