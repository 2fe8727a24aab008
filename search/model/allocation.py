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
from search.model.hulls import spend


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """chosen: (L, H) candidate, -1 in layers left alone. tail: the dense tail that goes with it.

    cost: of all heads together. price: loss that a unit of cost has to save to be spent. weight:
    (L,) of the layers' losses. kinds: weight of each kind of prompt's loss."""

    chosen: np.ndarray
    tail: int
    cost: float
    price: float
    weight: np.ndarray
    kinds: Mapping[str, float]

    @property
    def digest(self) -> str:
        """Tells it from others by what is served."""
        return hashlib.sha256(
            self.chosen.astype("<i8").tobytes() + str(self.tail).encode()
        ).hexdigest()[:32]

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

    curves: by dense tail. costs: (L, H, C) by dense tail. all_keys: what one head costs that
    computes everything."""

    curves: Mapping[int, Curves]
    costs: Mapping[int, np.ndarray]
    all_keys: float

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
    ) -> Allocation:
        """One budget for the model: the least weighted loss for at most `total`.

        Args:
            total: what all heads may cost together.
            tail: the dense tail.
            weight: (L,) of each layer's loss; ones if None.
            kinds: weight of the loss of each kind of prompt; ones if None.

        Raises:
            HeadwiseError: the total is less than all heads' cheapest candidates.
        """
        curves = self.curves[tail]
        costs = self.costs[tail]
        weight = np.ones(len(costs)) if weight is None else weight
        layers = np.flatnonzero(self.searched)
        loss = curves.loss(kinds)[layers] * weight[layers, None, None]
        own = costs[layers]
        spent = spend(loss.reshape(-1, loss.shape[-1]), own.reshape(-1, loss.shape[-1]), total)
        entries = np.array(spent.entries).reshape(loss.shape[:2])
        chosen = np.full(costs.shape[:2], -1, dtype=np.int64)
        chosen[layers] = entries
        return Allocation(
            chosen=chosen,
            tail=tail,
            cost=float(np.take_along_axis(own, entries[..., None], axis=-1).sum()),
            price=spent.price,
            weight=weight,
            kinds=dict(kinds or dict.fromkeys(curves.losses(), 1.0)),
        )
