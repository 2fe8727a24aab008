"""The maths of the profile on small cases whose results can be written down."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from profiling.similarities.mass import ability, agreement, covered, kept


def test_kept_is_the_later_layers_attention_on_the_earlier_ones_choice() -> None:
    means = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    found = kept(means, torch.tensor([[0, 1], [2, 0]]))
    torch.testing.assert_close(found, torch.tensor([[0.8, 0.2], [0.7, 0.9]]).double())


def test_covered_counts_both_ends_of_a_half_open_span() -> None:
    chosen = torch.tensor([[3, 9, 1], [5, 6, 2], [0, 1, 2]])
    assert covered((3, 6), chosen).tolist() == pytest.approx([1 / 3, 1 / 3, 0])


def test_ability_is_the_mean_over_the_layers_within_reach() -> None:
    mass = np.arange(16, dtype=np.float64).reshape(4, 4)
    assert ability(mass, 2)[:3].tolist() == [1.5, 6.5, 11.0] and np.isnan(ability(mass, 2)[3])
    mass[:, 1] = mass[1] = np.nan
    np.testing.assert_array_equal(ability(mass, 2), [2, np.nan, 11, np.nan])
    np.testing.assert_array_equal(ability(mass, 1), [np.nan, np.nan, 11, np.nan])


def test_agreement_is_the_correlation_above_the_diagonal() -> None:
    random = np.random.default_rng(0)
    one = random.random((5, 5))
    below = one + np.tril(random.random((5, 5)))
    opposite = -2 * one
    other = random.random((5, 5))
    found = agreement([one, below, opposite, other])
    np.testing.assert_allclose(found[0, :3], [1, 1, -1])
    upper = np.triu_indices(5, 1)
    assert found[0, 3] == pytest.approx(np.corrcoef(one[upper], other[upper])[0, 1])
    for mass in (one, other):
        mass[2] = mass[:, 2] = np.nan
    assert np.isfinite(agreement([one, other])).all()


def test_too_few_layers_to_agree() -> None:
    mass = np.full((3, 3), np.nan)
    mass[0, 2] = 0.5
    assert np.isnan(agreement([mass, mass])).all()
    assert agreement([mass]).shape == (1, 1)
