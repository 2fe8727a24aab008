"""From scores to winners."""

from __future__ import annotations

import pytest

from artifacts import HeadwiseError
from search.published.choose import best_single_kind, choose, choose_layer, mean_scores, winners
from search.published.score import Score
from search.published.space import Family

FAMILIES = [
    Family(kind="a_shape", start=(("sink", 64), ("window", 128)), step=1),
    Family(kind="block_sparse", start=(("blocks", 4),), step=1),
    Family(kind="block_sparse", start=(("blocks", 8),), step=1),
]
SIZES = [{"sink": 64, "window": 128}, {"blocks": 4}, {"blocks": 8}]


def scores(*rows: tuple[float, float, float, bool]) -> list[Score]:
    return [
        Score(sizes=sizes, error=error, recall=recall, density=density, within=within)
        for sizes, (error, recall, density, within) in zip(SIZES, rows, strict=True)
    ]


def test_smallest_error_wins() -> None:
    choice = choose(scores((0.3, 0.9, 0.2, True), (0.2, 0.8, 0.2, True), (0.4, 0.95, 0.2, True)), FAMILIES)
    assert choice is not None and choice.candidate == 1 and choice.pattern.kind == "block_sparse"


def test_a_tie_goes_to_the_cheaper() -> None:
    choice = choose(scores((0.2, 0.9, 0.3, True), (0.2, 0.9, 0.1, True), (0.2, 0.9, 0.2, True)), FAMILIES)
    assert choice is not None and choice.candidate == 1


def test_over_budget_is_out_however_good() -> None:
    choice = choose(scores((0.5, 0.5, 0.2, True), (0.0, 1.0, 0.9, False), (0.0, 1.0, 0.9, False)), FAMILIES)
    assert choice is not None and choice.candidate == 0


def test_nothing_within_budget_names_the_head() -> None:
    with pytest.raises(HeadwiseError, match=r"head 7\.1.*0\.400"):
        fine = scores((0.1, 1, 0.1, True), (0.1, 1, 0.1, True), (0.1, 1, 0.1, True))
        none = scores((0.1, 1, 0.4, False), (0.1, 1, 0.5, False), (0.1, 1, 0.6, False))
        choose_layer(7, [fine, none], FAMILIES)


def test_means_over_prompts() -> None:
    first = scores((0.2, 0.8, 0.1, True), (0.4, 0.6, 0.2, True), (0.6, 0.4, 0.3, True))
    second = scores((0.4, 0.6, 0.3, True), (0.2, 0.8, 0.2, True), (0.2, 0.8, 0.1, True))
    mean = mean_scores([first, second])
    assert [s.error for s in mean] == pytest.approx([0.3, 0.3, 0.4])
    assert [s.recall for s in mean] == pytest.approx([0.7, 0.7, 0.6])
    assert [s.sizes for s in mean] == SIZES


def test_best_single_kind_takes_each_heads_best_of_that_kind() -> None:
    heads = [
        scores((0.3, 0.90, 0.2, True), (0.2, 0.5, 0.2, True), (0.1, 0.8, 0.2, True)),
        scores((0.3, 0.70, 0.2, True), (0.2, 0.9, 0.2, True), (0.4, 0.1, 0.2, True)),
    ]
    assert best_single_kind(heads, FAMILIES) == ("block_sparse", pytest.approx(0.85))
    assert winners(choose_layer(0, heads, FAMILIES)) == {"block_sparse": 2}
