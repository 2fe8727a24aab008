"""Layers and heads chosen together are the best of every choice and every map."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from profiling.similarities.mass import head_sets
from search.decode.filter_layers import Choice, Rules, best_choice, served, total
from search.decode.filter_search import best_kind
from search.decode.found import Score
from search.decode.head_map import allowed, head_map, of_heads, pair_costs, with_heads

CHOOSERS = head_sets(3, "group")


def test_which_heads_may_choose_together() -> None:
    assert CHOOSERS == ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
    assert head_sets(1, "group") == ((0,),) and head_sets(3, "pooled") == ((0, 1, 2),)
    assert head_sets(8, "group")[8:] == ((0, 1), (2, 3), (4, 5), (6, 7), (0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8)))
    assert [len(allowed(CHOOSERS, kind)) for kind in ("pooled", "head", "group")] == [1, 4, 7]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["pooled", "head", "group"])
def test_no_layers_and_no_map_cost_less(kind: str, seed: int) -> None:
    layers, rules = range(5), Rules(sparse=0.4, filters=2)
    cost = np.random.default_rng(seed).random((5, len(CHOOSERS), 5, 3))
    may = allowed(CHOOSERS, kind)
    found = with_heads(best_choice(pair_costs(cost, may), layers, rules), cost, layers, may)
    costs = []
    for kinds in product("fds", repeat=5):
        choice = Choice(*(tuple(at for at in layers if kinds[at] == kind) for kind in "fd"))
        first = min(choice.filter_layers, default=5)
        if not choice.filter_layers or len(choice.filter_layers) > 2 or choice.full > 3 or "s" in kinds[:first]:
            continue
        rows = served(layers, choice).items()
        costs.append(sum(min(cost[f, u, j, g] for u in may) for j, f in rows for g in range(3)))
    assert total(of_heads(cost, found).sum(-1), layers, found) == pytest.approx(min(costs))
    table = head_map(found, CHOOSERS, layers)
    assert (table is None) == (kind == "pooled")
    for layer, row in enumerate(table or ()):
        assert (row is None) == (layer not in served(layers, found))
        assert row is None or all(CHOOSERS.index(heads) in may for heads in row)


@pytest.mark.parametrize(
    ("mapped", "best"),
    [
        ((0.020, 0.010, 0.041), 1),  # Half of the error in every task.
        ((0.039, 0.019, 0.081), 0),  # As often less as more.
        ((0.001, 0.021, 0.084), 0),  # One task alone says so.
        ((0.080, 0.040, 0.160), 0),
    ],
)
def test_a_map_is_taken_where_every_task_speaks_for_it(mapped: tuple[float, ...], best: int) -> None:
    tried = [
        Score(choice=Choice((0,), ()), kept=1.0, error=sum(errors) / 3, by_task=errors)
        for errors in ((0.040, 0.020, 0.080), mapped)
    ]
    assert best_kind(tried) == best
    assert best_kind([replace(each, by_task=each.by_task[:1]) for each in tried]) == 0
