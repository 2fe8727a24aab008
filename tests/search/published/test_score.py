"""From scores to winners."""

from __future__ import annotations

import numpy as np
import pytest

from artifacts import HeadwiseError
from kernels.patterns import make
from search.published.score import FamilyScores, best_single_kind, least_error, mean_scores
from search.published.search import choose_all
from search.published.space import Family

FAMILIES = [
    Family(kind="a_shape", start=(("sink", 64), ("window", 128)), step=1),
    Family(kind="block_sparse", start=(("blocks", 4),), step=1),
    Family(kind="block_sparse", start=(("blocks", 8),), step=1),
]
SIZES = np.array([[64, 128], [4, 0], [8, 0]])


def scores(*rows: tuple[float, float, float, bool]) -> FamilyScores:
    error, recall, density, within = map(np.array, zip(*rows, strict=True))
    return {"error": error, "recall": recall, "density": density, "within": within, "sizes": SIZES}


def test_smallest_error_wins() -> None:
    assert least_error(scores((0.3, 0.9, 0.2, True), (0.2, 0.8, 0.2, True), (0.4, 0.95, 0.2, True))) == 1


def test_a_tie_goes_to_the_cheaper() -> None:
    assert least_error(scores((0.2, 0.9, 0.3, True), (0.2, 0.9, 0.1, True), (0.2, 0.9, 0.2, True))) == 1


def test_over_budget_is_out_however_good() -> None:
    assert least_error(scores((0.5, 0.5, 0.2, True), (0.0, 1.0, 0.9, False), (0.0, 1.0, 0.9, False))) == 0
    assert least_error(scores((0.1, 1, 0.4, False), (0.1, 1, 0.5, False), (0.1, 1, 0.6, False))) is None


def test_nothing_within_budget_names_the_head() -> None:
    fine = scores((0.1, 1, 0.1, True), (0.1, 1, 0.1, True), (0.1, 1, 0.1, True))
    none = scores((0.1, 1, 0.4, False), (0.1, 1, 0.5, False), (0.1, 1, 0.6, False))
    assert choose_all([None, [fine, fine]]).tolist() == [[-1, -1], [0, 0]]
    with pytest.raises(HeadwiseError, match=r"head 1\.1.*0\.400"):
        choose_all([None, [fine, none]])


def test_means_over_prompts() -> None:
    first = scores((0.2, 0.8, 0.1, True), (0.4, 0.6, 0.2, True), (0.6, 0.4, 0.3, True))
    second = scores((0.4, 0.6, 0.3, True), (0.2, 0.8, 0.2, False), (0.2, 0.8, 0.1, True))
    mean = mean_scores([first, second])
    assert mean["error"] == pytest.approx([0.3, 0.3, 0.4]) and mean["recall"] == pytest.approx([0.7, 0.7, 0.6])
    assert mean["within"].tolist() == [True, False, True] and mean["sizes"] is SIZES


def test_best_single_kind_takes_each_heads_best_of_that_kind() -> None:
    heads = [
        scores((0.3, 0.90, 0.2, True), (0.2, 0.5, 0.2, True), (0.1, 0.8, 0.2, True)),
        scores((0.3, 0.70, 0.2, True), (0.2, 0.9, 0.2, True), (0.4, 0.1, 0.2, True)),
    ]
    assert best_single_kind(heads, FAMILIES) == ("block_sparse", pytest.approx(0.85))


def test_sizes_of_a_pattern_give_the_pattern() -> None:
    for family, sizes, pattern in zip(
        FAMILIES,
        SIZES,
        (make("a_shape", sink=64, window=128), make("block_sparse", blocks=4), make("block_sparse", blocks=8)),
        strict=True,
    ):
        assert family.sized(sizes) == pattern and family.sizes_of(pattern) == [size for size in sizes if size]
