"""From curves to patterns: what each head gets for a budget.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import Pattern as ArtifactPattern
from kernels.patterns import LayerPlan, Pattern
from search.common.scores import Rows, picked, rows_of
from search.model.curves import Curves
from search.model.hulls import Spent, spend

# Choices for a rank's heads that are weighed against each other, where a layer takes as long as its slowest rank.
_KEPT = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """chosen: (L, H) candidate, -1 in layers left alone. tail: the dense tail that goes with it.

    cost: of all heads together. price: loss that a unit of cost has to save to be spent. weight: (L,) of the layers'
    losses. kinds: weight of each kind of prompt's loss.
    """

    chosen: np.ndarray
    tail: int
    cost: float
    price: float
    weight: np.ndarray
    kinds: Mapping[str, float]

    @property
    def digest(self) -> str:
        """Tells it from others by what is served."""
        return hashlib.sha256(self.chosen.astype("<i8").tobytes() + str(self.tail).encode()).hexdigest()[:32]

    def pick(self, values: np.ndarray) -> np.ndarray:
        """(L, H) of (L, H, C): each head's with what it got, NaN in layers left alone."""
        return picked(values, self.chosen)

    def plans(self, candidates: Sequence[Pattern], num_kv_heads: int) -> dict[int, LayerPlan]:
        """The plan of each layer that has patterns."""
        return {
            layer: LayerPlan([candidates[c] for c in row], num_kv_heads, dense_tail=self.tail)
            for layer, row in enumerate(self.chosen)
            if row[0] >= 0
        }

    def rows(self, candidates: Sequence[Pattern]) -> tuple[Rows, dict[str, ArtifactPattern]]:
        """An artifact's rows of pattern names, and the patterns that they name."""
        return rows_of(None if row[0] < 0 else [candidates[c] for c in row] for row in self.chosen)


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

    def least(self, tail: int, allowed: np.ndarray | None = None) -> float:
        """What all heads cost with their cheapest candidates, of those (C,) that are allowed."""
        own = self.costs[tail][self.searched]
        return spent_by((own if allowed is None else own[..., allowed]).min(axis=-1), self.ranks)

    def predicted(self, allocation: Allocation) -> float:
        """What the curves say that an allocation loses, with equal weights."""
        return sum(self.predicted_by_kind(allocation).values())

    def predicted_by_kind(self, allocation: Allocation) -> dict[str, float]:
        """The same by kind of prompt, nats a token."""
        losses = self.curves[allocation.tail].losses()
        return {kind: float(np.nansum(allocation.pick(values))) for kind, values in losses.items()}

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
        else:
            spent = _over_ranks(loss, own, total, self.ranks)
        entries = np.array(spent.entries).reshape(loss.shape[:2])
        chosen = np.full(costs.shape[:2], -1, dtype=np.int64)
        chosen[layers] = entries
        return Allocation(
            chosen=chosen,
            tail=tail,
            cost=spent_by(np.take_along_axis(own, entries[..., None], axis=-1)[..., 0], self.ranks),
            price=spent.price,
            weight=weight,
            kinds=dict(kinds or dict.fromkeys(curves.losses(), 1.0)),
        )


def spent_by(costs: np.ndarray, ranks: int) -> float:
    """What heads (L, H) cost together: all of them, or of `ranks` that share the heads so many times the slowest.

    Layers run one after the other, and each waits for the slowest of its equal parts.
    """
    return ranks * float(costs.reshape(len(costs), ranks, -1).sum(axis=-1).max(axis=-1).sum())


def _over_ranks(loss: np.ndarray, costs: np.ndarray, total: float, ranks: int) -> Spent:
    """The best entries of L x H heads where layers one after the other cost at most `total`, as `spent_by` counts.

    What a layer loses within some time is what its ranks lose, each within that time: a knapsack of the rank's own
    heads, whose front holds all times at which it is worth to have more. Times are then spent over the layers.
    """
    layers = [_of_layer(lost, own, ranks) for lost, own in zip(loss, costs, strict=True)]
    width = max(len(times) for times, _, _ in layers)

    def wide(values: np.ndarray, rest: float) -> np.ndarray:
        return np.pad(values, (0, width - len(values)), constant_values=rest)

    lost = np.array([wide(values, np.inf) for _, values, _ in layers])
    spent = spend(lost, np.array([wide(ranks * times, np.inf) for times, _, _ in layers]), total)
    entries = [rows[entry] for (_, _, rows), entry in zip(layers, spent.entries, strict=True)]
    return Spent(entries=np.concatenate(entries).tolist(), price=spent.price)


def _of_layer(loss: np.ndarray, costs: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times (n,) ascending at which a layer of H heads loses less, what it loses, and its entries (n, H)."""
    parts = [_knapsack(*part) for part in zip(np.split(loss, ranks), np.split(costs, ranks), strict=True)]
    times = np.unique(np.concatenate([own for own, _, _ in parts]))
    times = times[times >= max(own[0] for own, _, _ in parts)]
    found = [np.searchsorted(own, times, side="right") - 1 for own, _, _ in parts]
    lost = sum(values[at] for (_, values, _), at in zip(parts, found, strict=True))
    return times, lost, np.concatenate([rows[at] for (_, _, rows), at in zip(parts, found, strict=True)], axis=1)


def _knapsack(loss: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Costs (n,) ascending, losses (n,) descending and entries (n, h) of the choices for h heads that none beats.

    Exact up to _KEPT choices of the heads so far; of more, so many are kept, spread evenly.
    """
    spent, lost, entries = np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
    for own_loss, own_cost in zip(loss, costs, strict=True):
        taken = np.flatnonzero(np.isfinite(own_loss))
        taken = taken[_unbeaten(own_cost[taken], own_loss[taken])]
        spent = (spent[:, None] + own_cost[taken]).ravel()
        lost = (lost[:, None] + own_loss[taken]).ravel()
        best = _unbeaten(spent, lost)
        if len(best) > _KEPT:
            best = best[np.linspace(0, len(best) - 1, _KEPT).round().astype(int)]
        spent, lost = spent[best], lost[best]
        entries = np.column_stack([entries[best // len(taken)], taken[best % len(taken)]])
    return spent, lost, entries


def _unbeaten(costs: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Indices of those that lose less than all that cost no more, the cheapest first."""
    order = np.lexsort((losses, costs))
    least = np.minimum.accumulate(losses[order])
    found: np.ndarray = order[np.append(True, least[1:] < least[:-1])]
    return found
