"""Kascade's rule against every set of anchors."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from search.decode.filter_layers import Choice, Rules, served
from search.decode.rules import best_anchors, by_kascade, by_loss, of_full

CHOOSERS = ((0,), (1,), (0, 1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_no_anchors_score_more(seed: int, count: int) -> None:
    score = np.random.default_rng(seed).random((7, 7))

    def total(anchors: tuple[int, ...]) -> float:
        return sum(score[max(a for a in anchors if a <= layer), layer] for layer in range(7))

    every = [(0, *rest) for size in range(count) for rest in combinations(range(1, 7), size)]
    found = best_anchors(score, count)
    assert tuple(found) in every and total(tuple(found)) == pytest.approx(max(map(total, every)))


def test_the_map_is_the_most_similar_single_head() -> None:
    least = np.random.default_rng(0).random((9, 3, 9, 2))
    layers = [1, 3, 4, 5, 7, 8]
    choice = by_kascade(least, np.ones(9), CHOOSERS, layers, Rules(sparse=0.5))
    assert 1 in (*choice.filter_layers, *choice.dense_layers) and choice.full <= 3
    assert choice.takes is not None
    for layer, filter_layer in served(layers, choice).items():
        assert choice.takes[layer] == tuple(least[filter_layer, :2, layer].argmax(axis=0))


def test_the_greedy_search_by_loss_takes_the_least_each_time() -> None:
    weights = np.random.default_rng(1).random(6)
    seen: list[set[int]] = []

    def loss(choice: Choice) -> float:
        full = {*choice.filter_layers, *choice.dense_layers}
        seen.append(full)
        return sum(weights[layer] for layer in range(6) if layer not in full)

    choice = by_loss(loss, range(6), Rules(sparse=0.5))
    kept = {0, *(1 + np.argsort(weights[1:])[-2:]).tolist()}
    assert {*choice.filter_layers, *choice.dense_layers} == kept
    assert len(seen) == 5 + 4 + 3 and all(0 in full for full in seen)


def test_an_anchor_that_serves_nobody_is_dense() -> None:
    assert of_full([0, 1, 4], range(5)) == Choice((1,), (0, 4))
