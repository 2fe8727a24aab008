"""One run of a search: its settings, the results of its phases, and losses that it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from artifacts import Artifact, ModelInfo, TaskFigures
from kernels.patterns import LayerPlan, Pattern
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt
from profiling.quality.sequences import Losses, Reference, TokenSequence, sequences
from profiling.ranks import Ranks
from profiling.shared_jobs import run_jobs
from profiling.speed.baselines import HEADWISE, Speedup, of_rounds
from profiling.speed.layer_times import Timings
from search.model.allocation import LARGEST_WEIGHT, Allocation, CostCurves
from search.model.costs import Costs
from search.model.losses import (
    ContextLoss,
    context_losses,
    loss_by_task,
    task_figures,
    task_names,
)
from search.model.proof import Proof
from search.study import Study

# The name of the accepted allocation among timings of attention.
CHOSEN = "chosen"
# Speed-up over the fastest dense baseline below which an artifact is not served.
WORTH = 1.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """A budget that the gate has tested.

    Attributes:
        name: of the round.
        allocation: of the budget.
        proof: its losses and their bounds.
        references: dense attention's predictions on its held-out contexts.
    """

    name: str
    allocation: Allocation
    proof: Proof
    references: tuple[Reference, ...]

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The held-out sequences that it was measured on."""
        return tuple(chain.from_iterable(each.sequences for each in self.references))


@dataclass(kw_only=True, eq=False)
class SearchRun:
    """A search as one rank runs it: settings, and results that its phases add in this order.

    Attributes:
        length: tokens of a prompt.
        prompts: of the calibration.
        candidates: patterns that heads try.
        layers: those that get patterns.
        tails: dense tails that are compared.
        seen: windows of calibration and held-out prompts.
        began: when the search began, by time.monotonic().
        calibration: sequences of the calibration prompts.
        gradient_fault: why gradients are missing; None where they are not.
        costs: costs of candidates.
        heads: curves and costs of all heads.
        study: gets each measured allocation as a trial.
        allocation: the first that the gate tests; after the gate the accepted one.
        rounds: budgets that the gate has tested, in order.
        accepted: the round whose allocation is written.
        points: allocations of the frontier with their losses on some of the accepted round's
            contexts, the accepted one first.
        attention: seconds of attention alone, by tokens; empty where FLOPs were counted.
        prefills: seconds of interleaved whole prefills, by the name of the fastest dense baseline
            and HEADWISE; empty where none was timed.
        artifact: the artifact, with its evidence.
        written: True if there is a file of it.
    """

    loaded: LoadedModel
    model: ModelInfo
    length: int
    prompts: list[Prompt]
    candidates: tuple[Pattern, ...]
    layers: tuple[int, ...]
    tails: tuple[int, ...]
    dtype: str
    device: str
    backend: str
    seen: Seen
    ranks: Ranks
    ledger: Ledger
    began: float

    calibration: Sequence[TokenSequence] = field(init=False)
    gradient_fault: str | None = None
    costs: Costs = field(init=False)
    heads: CostCurves = field(init=False)
    study: Study = field(init=False)
    allocation: Allocation = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    accepted: Round = field(init=False)
    points: Sequence[tuple[Allocation, Sequence[ContextLoss]]] = ()
    attention: Mapping[int, Timings] = field(default_factory=dict)
    prefills: Mapping[str, Sequence[float]] = field(default_factory=dict)
    artifact: Artifact = field(init=False)
    written: bool = False

    @property
    def tasks(self) -> tuple[TaskFigures, ...]:
        """Figures of each task of the held-out prompts, and of all answers together."""
        return task_figures(self.accepted.proof.losses, self.length)

    @property
    def timed_sequence(self) -> TokenSequence:
        """The held-out prompt on which times are measured."""
        return self.accepted.sequences[0]

    @property
    def spent(self) -> float:
        """The cost of the allocation, as a fraction of dense attention's."""
        return round(self.heads.share(self.allocation.cost), 4)

    @property
    def longest(self) -> Timings:
        """Seconds of attention over the whole prompt."""
        return self.attention[max(self.attention)]

    @property
    def first_token(self) -> Speedup | None:
        """Speed-up of whole prefills, of the ratios within rounds; None where none was timed."""
        if not self.prefills:
            return None
        return of_rounds(self.prefills, HEADWISE)

    @property
    def gain(self) -> float:
        """Speed-up of attention over the fastest dense baseline; in FLOPs, how many times fewer."""
        if not self.attention:
            return self.heads.total(1.0) / self.allocation.cost
        return self.longest.ratio(CHOSEN)

    @property
    def is_worth_serving(self) -> bool:
        """False if attention gains too little, or whole prefills are slower beyond noise."""
        if self.first_token is None:
            return self.gain >= WORTH
        _, high = self.first_token.bounds[self.first_token.fastest]
        return self.gain >= WORTH and high >= 1

    @property
    def is_reliably_faster(self) -> bool:
        """True if it gains enough, and whole prefills are faster in every round."""
        if self.first_token is None:
            return self.is_worth_serving
        low, _ = self.first_token.bounds[self.first_token.fastest]
        return self.is_worth_serving and low > 1

    def density(self, tail: int) -> np.ndarray:
        """(L, H, C) tiles computed, relative to dense attention's."""
        tiles = self.heads.curves[tail].tiles
        dense = [pattern.kind for pattern in self.candidates].index("dense")
        density: np.ndarray = tiles / tiles[..., dense : dense + 1]
        return density

    def plans(self, allocation: Allocation) -> dict[int, LayerPlan]:
        """The layer plans that serve an allocation."""
        return allocation.plans(self.candidates, self.model.num_kv_heads)

    def reference(self, prompts: Sequence[Prompt]) -> Reference:
        """Dense attention's predictions on prompts, computed when they are needed."""
        tokens = sequences(prompts, self.loaded.tokenizer)
        return Reference(self.loaded.model, tokens, backend=self.backend)

    def measure(
        self,
        reference: Reference,
        allocations: Sequence[Allocation],
        numbers: Sequence[int] | None = None,
        *,
        name: str = "",
    ) -> list[tuple[ContextLoss, ...]]:
        """Measure the losses of allocations on sequences of a reference; ranks share the passes.

        Args:
            reference: the baseline of the losses.
            allocations: to run.
            numbers: of the sequences to run on; all if None.
            name: of the phase to show; none is shown if empty, as inside of another phase.
        """
        if numbers is None:
            numbers = range(len(reference.sequences))
        units = []
        jobs = {}
        for allocation in allocations:
            for number in numbers:
                depends = {
                    "allocation": allocation.digest,
                    "sequence": reference.sequences[number].digest,
                }
                unit = self.ledger.unit("losses", depends)
                units.append(unit)
                jobs[unit.key] = (allocation, number)

        def work(unit: Unit) -> dict[str, Any]:
            allocation, number = jobs[unit.key]
            return dict(vars(reference.losses(number, self.plans(allocation))))

        measured = [reference.sequences[number] for number in numbers]
        quiet = not name or not self.ranks.is_first
        with phase(name, len(units), "passes", quiet=quiet) as shown:
            # A dense pass takes about as long as one by patterns: one rank runs all of a sequence.
            values = run_jobs(
                self.ledger,
                self.ranks,
                units,
                work,
                group=lambda unit: jobs[unit.key][1],
                shown=shown,
            )
        losses = [Losses(**value) for value in values]
        count = len(measured)
        return [
            context_losses(measured, losses[at * count : (at + 1) * count])
            for at in range(len(allocations))
        ]

    def start_study(self, storage: str | None, name: str, held_out: Sequence[Prompt]) -> None:
        """Start the study: losses of the tasks of held-out prompts, and cost, are its values."""
        tokens = sequences(held_out, self.loaded.tokenizer) if storage is not None else []
        space = {
            "budget": (0.0, 1.0),
            "cost": (0.0, 1.0),
            "answer_weight": (0.0, LARGEST_WEIGHT**2),
            "dense_tail": sorted(self.tails),
        }
        tasks = dict.fromkeys(chain.from_iterable(map(task_names, tokens)))
        self.study = Study(storage, name, space, (*tasks, "cost"))

    def add_trial(
        self, allocation: Allocation, losses: Sequence[ContextLoss], prompts: str
    ) -> None:
        """Add a measured allocation to the study.

        Args:
            allocation: its parameters.
            losses: of the allocation.
            prompts: the name of the set that it was measured on.
        """
        weights = allocation.prompt_weights
        cost = min(1.0, self.heads.share(allocation.cost))
        self.study.add(
            {
                "budget": min(1.0, self.heads.share(allocation.budget)),
                "cost": cost,
                "answer_weight": weights.get("answer", 1.0) / weights.get("text", 1.0),
                "dense_tail": allocation.tail,
            },
            {**loss_by_task(losses), "cost": cost},
            prompts=prompts,
            density=float(np.nanmean(allocation.pick(self.density(allocation.tail)))),
            **{self.heads.unit: allocation.cost},
        )
