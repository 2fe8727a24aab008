"""Allocation: from curves and costs to one candidate for each head within a budget.

Shapes: L layers, H query heads, C candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from artifacts import HeadwiseError
from artifacts import Pattern as ArtifactPattern
from artifacts.schema.search import CostUnit, share_of_dense
from kernels.patterns import LayerPlan, Pattern
from search.model.costs import Costs
from search.model.curves import Curves
from search.model.hulls import spend
from search.model.rows import Rows, pick, rows_of

# Smallest total relative to the cost of the cheapest candidates, so that there is a choice.
MARGIN = 1.01
# The weight of a kind of prompts is at most this, and at least its inverse.
LARGEST_WEIGHT = 8.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """One candidate for each head, and the dense tail that goes with them.

    Attributes:
        candidates: (L, H) index in the grid, -1 in layers without patterns.
        budget: the most that all heads together were allowed to cost.
        cost: of all heads together.
        price: loss that a unit of cost has to save to be spent.
        prompt_weights: of the losses of each kind of prompt.
    """

    candidates: np.ndarray
    tail: int
    budget: float
    cost: float
    price: float
    prompt_weights: Mapping[str, float]

    @property
    def digest(self) -> str:
        """Hash of the patterns and the dense tail, in hexadecimal."""
        content = self.candidates.astype("<i8").tobytes() + str(self.tail).encode()
        return hashlib.sha256(content).hexdigest()[:32]

    def pick(self, values: np.ndarray) -> np.ndarray:
        """(L, H) of (L, H, C): values of the chosen candidates, NaN in layers without patterns."""
        return pick(values, self.candidates)

    def plans(self, grid: Sequence[Pattern], num_kv_heads: int) -> dict[int, LayerPlan]:
        """The plan of each layer that has patterns."""
        return {
            layer: LayerPlan([grid[c] for c in row], num_kv_heads, dense_tail=self.tail)
            for layer, row in enumerate(self.candidates)
            if row[0] >= 0
        }

    def rows(self, grid: Sequence[Pattern]) -> tuple[Rows, dict[str, ArtifactPattern]]:
        """An artifact's rows of pattern names, and the patterns by name."""
        return rows_of(None if row[0] < 0 else [grid[c] for c in row] for row in self.candidates)


@dataclass(frozen=True, kw_only=True, eq=False)
class CostCurves:
    """Curves and costs of all heads of a model, by dense tail.

    Attributes:
        costs: (L, H, C) each, in `unit`.
        all_keys: the cost of one head that computes everything.
    """

    curves: Mapping[int, Curves]
    costs: Mapping[int, np.ndarray]
    all_keys: float
    unit: CostUnit

    @classmethod
    def from_curves(
        cls, curves: Mapping[int, Curves], costs: Costs, grid: Sequence[Pattern]
    ) -> CostCurves:
        """Curves with the costs of their candidates."""
        return cls(
            curves=curves,
            costs={tail: costs.spent(grid, each.tiles) for tail, each in curves.items()},
            all_keys=costs.all_keys(),
            unit=costs.unit,
        )

    @property
    def searched(self) -> np.ndarray:
        """(L,) True in layers that have candidates."""
        return next(iter(self.curves.values())).searched

    def total(self, share: float) -> float:
        """A budget: this fraction of dense attention's cost."""
        heads = next(iter(self.costs.values())).shape[1]
        return share * self.all_keys * int(self.searched.sum()) * heads

    def share(self, total: float) -> float:
        """A total as a fraction of dense attention's cost."""
        return total / self.total(1.0)

    def describe(self, total: float) -> str:
        """A total as a fraction of dense attention's cost, in words."""
        return share_of_dense(self.share(total), self.unit)

    def least(self, tail: int) -> float:
        """The cost of all heads with their cheapest candidates."""
        return float(self.costs[tail][self.searched].min(axis=-1).sum())

    def predicted(self, allocation: Allocation) -> float:
        """The loss of an allocation by the curves, with equal weights."""
        return sum(self.predicted_by_kind(allocation).values())

    def predicted_by_kind(self, allocation: Allocation) -> dict[str, float]:
        """The same by kind of prompt, nats a token."""
        return self.losses_of(allocation.candidates, allocation.tail)

    def losses_of(self, candidates: np.ndarray, tail: int) -> dict[str, float]:
        """Predicted losses by kind of prompt of (L, H) candidates, nats a token."""
        losses = self.curves[tail].losses()
        return {kind: float(np.nansum(pick(values, candidates))) for kind, values in losses.items()}

    def reallocate(self, allocation: Allocation, total: float) -> Allocation:
        """Spend another total with an allocation's weights and dense tail."""
        return self.allocate(total, allocation.tail, prompt_weights=allocation.prompt_weights)

    def cheapest(
        self,
        targets: Mapping[str, float],
        tail: int,
        *,
        prompt_weights: Mapping[str, float] | None = None,
    ) -> Allocation:
        """The cheapest allocation whose predicted losses are within targets, to 1% of its cost.

        Args:
            targets: by kind of prompt, nats a token.
            tail: the dense tail.
            prompt_weights: as for `allocate`.

        Returns:
            The allocation; of the whole cost of dense attention where nothing else is within them.
        """

        def allocate(total: float) -> Allocation:
            return self.allocate(total, tail, prompt_weights=prompt_weights)

        def is_within(allocation: Allocation) -> bool:
            losses = self.predicted_by_kind(allocation)
            return all(losses[kind] <= target for kind, target in targets.items())

        low = self.least(tail) * MARGIN
        high = max(self.total(1.0), low)
        best = allocate(high)
        cheapest = allocate(low)
        if is_within(cheapest):
            return cheapest
        while high > low * 1.01:
            middle = (low * high) ** 0.5
            allocation = allocate(middle)
            if is_within(allocation):
                high = middle
                best = allocation
            else:
                low = middle
        return best

    def allocate(
        self,
        total: float,
        tail: int,
        *,
        prompt_weights: Mapping[str, float] | None = None,
    ) -> Allocation:
        """Spend one budget over the model: the least weighted loss for at most `total`.

        Args:
            total: budget of all heads together.
            tail: the dense tail.
            prompt_weights: weight of the loss of each kind of prompt; ones if None.

        Raises:
            HeadwiseError: the total is less than all heads' cheapest candidates.
        """
        curves = self.curves[tail]
        costs = self.costs[tail]
        layers = np.flatnonzero(self.searched)
        loss = curves.loss(prompt_weights)[layers]
        own = costs[layers]
        by_head = (-1, loss.shape[-1])
        entries, price = spend(loss.reshape(by_head), own.reshape(by_head), total)
        indices = np.array(entries).reshape(loss.shape[:2])
        candidates = np.full(costs.shape[:2], -1, dtype=np.int64)
        candidates[layers] = indices
        return Allocation(
            candidates=candidates,
            tail=tail,
            budget=total,
            cost=float(np.take_along_axis(own, indices[..., None], axis=-1).sum()),
            price=price,
            prompt_weights=dict(prompt_weights or dict.fromkeys(curves.losses(), 1.0)),
        )


def spendable(heads: CostCurves, share: float, *, length: int) -> float:
    """The total of a budget that was asked for.

    Args:
        heads: curves and costs.
        share: the budget, as a fraction of dense attention's cost.
        length: of the prompts, for the message.

    Raises:
        HeadwiseError: it is less than the cheapest candidates.
    """
    total = heads.total(share)
    cheapest = min(heads.least(tail) for tail in heads.curves)
    if total > cheapest * MARGIN:
        return total
    raise HeadwiseError(
        f"--budget {share:g} is impossible at {length} tokens: the cheapest candidates cost "
        f"{heads.describe(cheapest)}; ask for a good deal more, or a longer --length"
    )
