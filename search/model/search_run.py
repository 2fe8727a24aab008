"""One run of a search: model, prompts, candidates, ranks, resume file, and measured losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts import ModelInfo
from kernels.patterns import LayerPlan, Pattern
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel
from profiling.progress import phase
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt
from profiling.quality.sequences import Losses, Reference, sequences
from profiling.ranks import Ranks
from profiling.shared_jobs import run_jobs
from search.model.allocation import LARGEST_WEIGHT, Allocation, Heads
from search.model.task_losses import TaskLoss, by_task
from search.study import Study


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """An allocation and its losses by task."""

    allocation: Allocation
    tasks: tuple[TaskLoss, ...]

    @property
    def by_kind(self) -> dict[str, float]:
        """Mean loss of the tasks of each kind that there is, `text` and `answer`, nats a token."""
        kinds: dict[str, list[float]] = {}
        for task in self.tasks:
            kinds.setdefault("answer" if task.answers else "text", []).append(task.loss)
        return {kind: float(np.mean(losses)) for kind, losses in kinds.items()}


def study_of(calibration: Reference, tails: Sequence[int], storage: str | None, name: str) -> Study:
    """The study of a search's allocations: losses of text and answers, and the cost."""
    kinds = {True: "text", False: "answer"}
    return Study(
        storage=storage,
        name=name,
        space={
            "cost": (0.0, 1.0),
            "answer_weight": (0.0, LARGEST_WEIGHT**2),
            "dense_tail": sorted(tails),
        },
        losses=(*dict.fromkeys(kinds[each.is_text] for each in calibration.sequences), "cost"),
    )


def add_trial(study: Study, heads: Heads, measured: Measured, prompts: str) -> None:
    """Add a measured allocation to the study.

    Args:
        study: of the search.
        heads: curves and costs.
        measured: the allocation and its losses.
        prompts: the name of the set that it was measured on.
    """
    if study.storage is None:
        return
    allocation = measured.allocation
    tiles = heads.curves[allocation.tail].tiles
    weights = allocation.prompt_weights
    cost = min(1.0, heads.share(allocation.cost))
    study.add(
        {
            "cost": cost,
            "answer_weight": weights.get("answer", 1.0) / weights.get("text", 1.0),
            "dense_tail": allocation.tail,
        },
        {**measured.by_kind, "cost": cost},
        prompts=prompts,
        density=float(np.nanmean(allocation.pick(tiles / tiles.max(axis=-1, keepdims=True)))),
        tasks={task.task: task.loss for task in measured.tasks},
        **{heads.unit: allocation.cost},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchRun:
    """A search as one rank runs it; settings are fixed from here on.

    Attributes:
        length: tokens of a prompt.
        prompts: of the calibration.
        candidates: patterns that heads try.
        layers: those that get patterns.
        tails: dense tails that are compared.
        seen: windows of calibration and held-out prompts.
        began: when the search began, by time.monotonic().
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
    ) -> list[Measured]:
        """Measure allocations on the sequences of a reference; the ranks share the passes.

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
        results = []
        for at, allocation in enumerate(allocations):
            own = losses[at * len(measured) : (at + 1) * len(measured)]
            results.append(Measured(allocation=allocation, tasks=tuple(by_task(measured, own))))
        return results
