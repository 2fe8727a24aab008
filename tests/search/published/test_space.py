"""The search space: budgets, scaling and ChangeSpace."""

from __future__ import annotations

import pytest
import torch

from artifacts import HeadwiseError
from kernels.patterns import LayerPlan, make
from search.published.space import PAPER_BUDGET, PAPER_LENGTH, builders, change_space, initial_space, target_tiles


def test_paper_space_is_the_papers() -> None:
    starts = [(family.kind, dict(family.start), family.step) for family in initial_space()]
    assert starts == [
        ("a_shape", {"sink": 1024, "window": 4096}, 50),
        ("vertical_slash", {"vertical": 30, "slash": 2048}, 50),
        ("vertical_slash", {"vertical": 100, "slash": 1800}, 50),
        ("vertical_slash", {"vertical": 500, "slash": 1500}, 50),
        ("vertical_slash", {"vertical": 3000, "slash": 200}, 50),
        ("block_sparse", {"blocks": 100}, 1),
    ]


def test_paper_budget_is_what_its_a_shape_computes() -> None:
    tensor = torch.empty(1).expand(1, 1, PAPER_LENGTH, 1)
    index = LayerPlan([make("a_shape", sink=1024, window=4096)], 1).build(tensor, tensor)
    assert target_tiles(PAPER_BUDGET, PAPER_LENGTH, 0) == int(index.computed_tiles())


def test_paper_a_shape_needs_no_change() -> None:
    """Algorithm 1 starts from the pattern that defines the target: it must come out as it went in."""
    family = initial_space()[0]
    q = torch.empty(1).expand(1, 2, PAPER_LENGTH, 1)
    build = builders([family], q, q, scale=1.0, dense_tail=0)["a_shape"]
    target = target_tiles(PAPER_BUDGET, PAPER_LENGTH, 0)
    patterns = change_space(family, target, build, num_heads=2, length=PAPER_LENGTH)
    assert patterns == [make("a_shape", sink=1024, window=4096)] * 2


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("0", "above 0"),
        ("1.5", "at most 1"),
        ("nan", "above 0"),
        ("lots", "fraction such as 0.25"),
        ("a_shape:100", "SINK,WINDOW"),
        ("a_shape:0,64", "positive"),
        ("a_shape:-1,64", "positive"),
        ("0.001", "impossible at 4096 tokens"),
    ],
)
def test_bad_budgets_say_what_would_be_right(budget: str, says: str) -> None:
    with pytest.raises(HeadwiseError, match=says) as caught:
        target_tiles(budget, 4096, 64)
    assert "\n" not in str(caught.value) and budget in str(caught.value)


@pytest.mark.parametrize("fraction", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("dense_tail", [0, 100])
@pytest.mark.parametrize("family", initial_space(), ids=lambda family: family.name)
def test_change_space_takes_the_largest_size_within_the_target(family, dense_tail: int, fraction: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 1000, 16) * 2, torch.randn(1, 2, 1000, 16)
    target = target_tiles(str(fraction), 1000, dense_tail)
    build = builders([family], q, k, scale=0.25, dense_tail=dense_tail)[family.kind]
    patterns = change_space(family, target, build, num_heads=4, length=1000)
    tiles = build(patterns).computed_tiles()[0]
    least, most = family.steps(1000)
    places = [next(n for n in range(least, most + 1) if family.at(n) == pattern) for pattern in patterns]
    for head, n in enumerate(places):
        if tiles[head] > target:
            assert n == least
        # The next larger pattern, if the family has one, costs more than the target.
        larger = next((m for m in range(n, most + 1) if family.at(m) != family.at(n)), None)
        if larger is not None and tiles[head] <= target:
            grown = [family.at(larger) if h == head else p for h, p in enumerate(patterns)]
            assert build(grown).computed_tiles()[0, head] > target


def test_sizes_move_in_steps_and_in_proportion() -> None:
    family = initial_space()[3]
    assert family.at(0) == make("vertical_slash", vertical=500, slash=1500)
    assert family.at(3) == make("vertical_slash", vertical=550, slash=1650)
    assert family.at(-3) == make("vertical_slash", vertical=450, slash=1350)
    least, most = family.steps(PAPER_LENGTH)
    assert 1 <= family.at(least).slash <= 50 and family.at(most).slash >= PAPER_LENGTH
