"""Predicted seconds are brought to what a model's own layers take."""

from __future__ import annotations

import numpy as np
import pytest

from search.model.measured_costs import line_through


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
