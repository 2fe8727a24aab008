"""From curves to patterns: what each head gets for a budget.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import HeadwiseError, pattern_name
from artifacts import Pattern as ArtifactPattern
from kernels.patterns import LayerPlan, Pattern
from search.common.recording import as_artifact_pattern
from search.model.curves import Curves
from search.model.hulls import spend


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """chosen: (L, H) candidate, -1 in layers left alone. tail: the dense tail that goes with it.

    cost: of all heads together. price: loss that a unit of cost has to save to be spent; None where heads have budgets
    of their own. weight: (L,) of the layers' losses. kinds: weight of each kind of prompt's loss.
    """

    chosen: np.ndarray
    tail: int
    cost: float
    price: float | None
    weight: np.ndarray
    kinds: Mapping[str, float]

    @property
    def digest(self) -> str:
        """Tells it from others by what is served."""
        return hashlib.sha256(self.chosen.astype("<i8").tobytes() + str(self.tail).encode()).hexdigest()[:32]

    def pick(self, values: np.ndarray) -> np.ndarray:
        """(L, H) of (L, H, C): each head's with what it got, NaN in layers left alone."""
        taken = np.take_along_axis(values, np.maximum(self.chosen, 0)[..., None], axis=-1)[..., 0]
        found: np.ndarray = np.where(self.chosen < 0, np.nan, taken)
        return found

    def plans(self, candidates: Sequence[Pattern], num_kv_heads: int) -> dict[int, LayerPlan]:
        """The plan of each layer that has patterns."""
        return {
            layer: LayerPlan([candidates[c] for c in row], num_kv_heads, dense_tail=self.tail)
            for layer, row in enumerate(self.chosen)
            if row[0] >= 0
        }

    def rows(
        self, candidates: Sequence[Pattern]
    ) -> tuple[tuple[tuple[str, ...] | None, ...], dict[str, ArtifactPattern]]:
        """An artifact's rows of pattern names, None for a layer left alone, and the patterns that they name."""
        rows: list[tuple[str, ...] | None] = []
        patterns: dict[str, ArtifactPattern] = {}
        for layer in self.chosen:
            if layer[0] < 0:
                rows.append(None)
                continue
            named = [as_artifact_pattern(candidates[c]) for c in layer]
            patterns.update({pattern_name(pattern): pattern for pattern in named})
            rows.append(tuple(pattern_name(pattern) for pattern in named))
        return tuple(rows), patterns


@dataclass(frozen=True, kw_only=True, eq=False)
class Heads:
    """What is known about all heads of a model.

    curves: by dense tail. costs: (L, H, C) by dense tail. all_keys: what one head costs that computes everything.
    ranks: of tensor parallelism, whose slowest one a layer takes as long as.
    """

    curves: Mapping[int, Curves]
    costs: Mapping[int, np.ndarray]
    all_keys: float
    ranks: int = 1

    @property
    def searched(self) -> np.ndarray:
        """(L,) whether the layer has candidates."""
        return next(iter(self.curves.values())).searched

    def total(self, share: float) -> float:
        """A budget: this share of what computing everything costs."""
        heads = next(iter(self.costs.values())).shape[1]
        return share * self.all_keys * int(self.searched.sum()) * heads

    def least(self, tail: int) -> float:
        """What all heads cost with their cheapest candidates."""
        return float(self.costs[tail][self.searched].min(axis=-1).sum())

    def by_model(
        self,
        total: float,
        tail: int,
        *,
        weight: np.ndarray | None = None,
        kinds: Mapping[str, float] | None = None,
        allowed: np.ndarray | None = None,
    ) -> Allocation:
        """One budget for the model: the least weighted loss for at most `total`.

        Args:
            total: what all heads may cost together; of tensor parallelism with n ranks, n times its slowest one.
            tail: the dense tail.
            weight: (L,) of each layer's loss; ones if None.
            kinds: weight of the loss of each kind of prompt; ones if None.
            allowed: (C,) candidates that may be taken; all if None.

        Raises:
            HeadwiseError: the total is less than all heads' cheapest candidates.
        """
        curves, costs = self.curves[tail], self.costs[tail]
        weight = np.ones(len(costs)) if weight is None else weight
        layers = np.flatnonzero(self.searched)
        loss = curves.loss(kinds)[layers] * weight[layers, None, None]
        if allowed is not None:
            loss = np.where(allowed, loss, np.inf)
        own = costs[layers]
        if self.ranks == 1:
            spent = spend(loss.reshape(-1, loss.shape[-1]), own.reshape(-1, loss.shape[-1]), total)
            entries, price = np.array(spent.entries).reshape(loss.shape[:2]), spent.price
        else:
            entries, price = _over_ranks(loss, own, total / self.ranks, self.ranks)
        chosen = np.full(costs.shape[:2], -1, dtype=np.int64)
        chosen[layers] = entries
        return self._allocation(chosen, tail, price, weight, kinds or dict.fromkeys(curves.losses(), 1.0))

    def by_head(self, total: float, tail: int) -> Allocation:
        """The same budget for every head, as in MInference 1.0, Algorithm 1: of what keeps to it the least error.

        The budget is the largest with which all heads together cost at most `total`; a head that has nothing within it
        takes its cheapest candidate.
        """
        layers = np.flatnonzero(self.searched)
        own, error = self.costs[tail][layers], self.curves[tail].error[layers]
        cheapest = own.min(axis=-1, keepdims=True)

        def chosen_for(each: float) -> np.ndarray:
            within = (own <= each) | (own <= cheapest)
            entries: np.ndarray = np.where(within, error, np.inf).argmin(axis=-1)
            return entries

        def total_of(entries: np.ndarray) -> float:
            return float(np.take_along_axis(own, entries[..., None], axis=-1).sum())

        # With more, heads only change to dearer candidates: what all cost together never falls.
        budgets = np.unique(own)
        fits = bisect_right(budgets, total * (1 + 1e-9), key=lambda each: total_of(chosen_for(float(each))))
        chosen = np.full(self.costs[tail].shape[:2], -1, dtype=np.int64)
        chosen[layers] = chosen_for(float(budgets[max(fits - 1, 0)]))
        return self._allocation(chosen, tail, None, np.ones(len(chosen)), {})

    def _allocation(
        self, chosen: np.ndarray, tail: int, price: float | None, weight: np.ndarray, kinds: Mapping[str, float]
    ) -> Allocation:
        found = Allocation(chosen=chosen, tail=tail, cost=0.0, price=price, weight=weight, kinds=dict(kinds))
        own = found.pick(self.costs[tail])
        cost = float(np.nansum(own)) if self.ranks == 1 else self.ranks * slowest(own[self.searched], self.ranks)
        return Allocation(chosen=chosen, tail=tail, cost=cost, price=price, weight=weight, kinds=dict(kinds))


def slowest(costs: np.ndarray, ranks: int) -> float:
    """What the layers (L, H) take one after the other where each waits for the slowest of its `ranks` parts."""
    return float(sum(max(part.sum() for part in np.array_split(row, ranks)) for row in costs))


def _over_ranks(loss: np.ndarray, costs: np.ndarray, total: float, ranks: int) -> tuple[np.ndarray, float]:
    """Entries (L, H) with the least loss where layers one after the other take at most `total`; and the price.

    A layer takes as long as the slowest of its ranks, each with an equal part of the heads. What a layer loses with a
    time is what its ranks lose when each spends that time on its own heads; times are then spent over the layers.
    """
    if loss.shape[1] % ranks:
        raise HeadwiseError(f"--tensor-parallel {ranks} does not divide {loss.shape[1]} query heads")
    times, lost, entries = [], [], []
    for own_loss, own_cost in zip(loss, costs, strict=True):
        parts = [slice(at, at + loss.shape[1] // ranks) for at in range(0, loss.shape[1], loss.shape[1] // ranks)]
        least = max(float(own_cost[part].min(axis=-1).sum()) for part in parts)
        most = max(float(own_cost[part].max(axis=-1).sum()) for part in parts)
        grid = np.unique(np.append(np.geomspace(max(least, most * 1e-6), most, 65), least))
        grid = grid[grid >= least]
        found = [[spend(own_loss[part], own_cost[part], float(time)).entries for part in parts] for time in grid]
        flat = np.array([[entry for part in each for entry in part] for each in found])
        heads = np.arange(loss.shape[1])
        times.append(np.array([slowest(own_cost[heads, row][None], ranks) for row in flat]))
        lost.append(np.array([own_loss[heads, row].sum() for row in flat]))
        entries.append(flat)
    width = max(map(len, times))
    padded = np.array([np.pad(row, (0, width - len(row)), constant_values=np.inf) for row in lost])
    spent = spend(padded, np.array([np.pad(row, (0, width - len(row)), mode="edge") for row in times]), total)
    return np.array([rows[entry] for rows, entry in zip(entries, spent.entries, strict=True)]), spent.price
