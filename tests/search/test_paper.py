"""The space, budgets, ChangeSpace and winners of MInference's search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from artifacts import HeadwiseError
from kernels.index import with_dense_tail
from kernels.patterns import KINDS, Inputs, largest
from search.model.config import PAPER_BUDGET, PAPER_LENGTH
from search.paper import SPACE, bounds, change_space, choose, moved, sizes, target_tiles


def test_paper_space_matches_the_paper():
    assert [(start.kind, sizes(start), sizes(moved(start, 1))) for start in SPACE] == [
        ("a_shape", {"sink": 1024, "window": 4096}, {"sink": 1036, "window": 4146}),
        ("vertical_slash", {"vertical": 30, "slash": 2048}, {"vertical": 31, "slash": 2098}),
        ("vertical_slash", {"vertical": 100, "slash": 1800}, {"vertical": 103, "slash": 1850}),
        ("vertical_slash", {"vertical": 500, "slash": 1500}, {"vertical": 517, "slash": 1550}),
        ("vertical_slash", {"vertical": 3000, "slash": 200}, {"vertical": 3050, "slash": 203}),
        ("block_sparse", {"blocks": 100}, {"blocks": 101}),
    ]


def test_paper_a_shape_is_unchanged():
    """Algorithm 1 starts from the pattern that defines the target and returns it unchanged."""
    q = torch.empty(1).expand(1, 2, PAPER_LENGTH, 1)
    build = KINDS["a_shape"].prepare([SPACE[0]] * 2, Inputs(range(2), q, q, 1.0))
    target = target_tiles(PAPER_BUDGET, PAPER_LENGTH, 0)
    assert change_space(
        SPACE[0], target, build, num_heads=2, length=PAPER_LENGTH, dense_tail=0
    ) == [0, 0]


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("0", "above 0"),
        ("nan", "above 0"),
        ("lots", "fraction such as 0.25"),
        ("a_shape:100", "SINK,WINDOW"),
        ("a_shape:-1,64", "positive"),
        ("0.001", "impossible at 4096 tokens"),
    ],
)
def test_invalid_budget_error_names_allowed_values(budget, says):
    with pytest.raises(HeadwiseError, match=says) as caught:
        target_tiles(budget, 4096, 64)
    assert "\n" not in str(caught.value) and budget in str(caught.value)


@pytest.mark.parametrize(("fraction", "dense_tail"), [(0.5, 0), (0.7, 100), (1.0, 0)])
@pytest.mark.parametrize("start", SPACE, ids=str)
def test_change_space_selects_largest_size_within_target(start, dense_tail, fraction):
    torch.manual_seed(0)
    q = torch.randn(1, 4, 1000, 16) * 2
    k = torch.randn(1, 2, 1000, 16)
    target = target_tiles(str(fraction), 1000, dense_tail)
    lower, upper = bounds(start, 1000)
    widest = largest([moved(start, upper), start])
    prepared = KINDS[start.kind].prepare([widest] * 4, Inputs(range(4), q, k, 0.25))

    def tiles(steps: list[int]) -> torch.Tensor:
        return with_dense_tail(
            prepared([moved(start, n) for n in steps]), dense_tail
        ).computed_tiles()[0]

    steps = change_space(start, target, prepared, num_heads=4, length=1000, dense_tail=dense_tail)
    more = tiles([min(n + 1, upper) for n in steps])
    for n, computed, next_computed in zip(steps, tiles(steps), more, strict=True):
        assert computed <= target or n == lower
        assert next_computed > target or n == upper


def test_selection_prefers_smallest_error_then_lowest_cost():
    scores = {
        "error": np.array([[0.3, 0.2, 0.4], [0.2, 0.2, 0.2], [0.5, 0.0, 0.0]]),
        "density": np.array([[0.2, 0.2, 0.2], [0.3, 0.1, 0.2], [0.2, 0.9, 0.9]]),
        "within": np.array([[True] * 3, [True] * 3, [True, False, False]]),
    }
    assert choose(scores, 4).tolist() == [1, 1, 0]
    scores["within"][2] = False
    with pytest.raises(HeadwiseError, match=r"head 4\.2: the cheapest computes 0\.200"):
        choose(scores, 4)


def test_sizes_shrink_to_one_and_grow_to_length():
    for start in SPACE:
        lower, upper = bounds(start, PAPER_LENGTH)
        step = 1 if start.kind == "block_sparse" else 50
        assert max(sizes(moved(start, lower)).values()) == max(sizes(start).values()) + lower * step
        assert max(sizes(moved(start, lower - 1)).values()) == 1
        assert max(sizes(moved(start, upper)).values()) >= (
            469 if start.kind == "block_sparse" else PAPER_LENGTH
        )
