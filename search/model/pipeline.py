"""The search with one budget for the whole model: curves of every head, spent where they save most,
proven end to end.

1. Curves: each calibration prompt is one dense pass forth and back, on which every head tries every
  candidate.
2. Costs: candidates are timed on the layers of a real prompt, or counted in FLOPs.
3. Allocation: for a budget the best by the curves, exactly; refinement tries it on the calibration
  prompts.
4. Gate: held-out prompts; where a task loses more than allowed, there is more budget, and other
  prompts report.

All ranks of a launch by torchrun share 1, 3 and 4. What is finished is in the ledger beside the
output."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

from artifacts import HeadwiseError, ModelInfo
from artifacts.files import check_writable
from profiling.environment import environment
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel, load_model, settled
from profiling.progress import phase
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import Prompt, digest, parse_task
from profiling.quality.sequences import Losses, Reference, TokenSequence, check_logits, sequences
from profiling.ranks import Ranks, ranks
from profiling.speed.layer_times import all_threads
from runtime.fingerprint import fingerprint
from search.common.layers import searched_layers, serving_backend
from search.model.allocation import Allocation, Heads
from search.model.candidates import ladder
from search.model.config import ModelSearch
from search.model.costs import Costs, flops
from search.model.curves import Curves
from search.model.gate import Gate
from search.model.measured_costs import costs_of, measured
from search.model.prompts import calibration_prompts, held_out_sets, lengths_of
from search.model.record import Recorded, record
from search.model.refine import Refinement, Trial, check_storage, refine
from search.model.scored_prompts import score_prompts
from search.model.setup import Outcome, Setup
from search.model.task_losses import TaskLoss, by_task

# Raised where the same unit would have another value.
_VERSION = 4


def run(config: ModelSearch) -> Recorded | None:
    """Search, and write `config.out` with its sidecar where that is worth it; None in ranks after
    the first.

    Raises:
        HeadwiseError: anything the user has to put right, or the gate, that nothing passes; no file
        is written then.
    """
    # What is not installed is said before any work.
    if config.n_trials > 1:
        import_module("optuna")
    if config.picture:
        import_module("matplotlib")
    check_writable(config.out)
    for task in config.tasks:
        parse_task(task)
    with ranks() as launch:
        device = launch.device(config.device)
        with launch.main_process_first():
            loaded = load_model(
                config.model,
                dtype=config.dtype,
                device=device,
                revision=config.revision,
                max_memory=config.max_memory,
            )
        model = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision)
        return search_model(config, loaded, model, launch)


def search_model(
    config: ModelSearch, loaded: LoadedModel, model: ModelInfo, launch: Ranks | None = None
) -> Recorded | None:
    """The search on a model that is loaded and fingerprinted."""
    config = settled(config)
    check_logits(loaded.model)
    searched = searched_layers(loaded)
    lengths = lengths_of(config, model)
    prompts = {length: calibration_prompts(config, loaded, length) for length in lengths}
    seen = Seen(prompt for made in prompts.values() for prompt in made)
    # Before any work: a text that is too short to hold prompts out is the user's to know of now.
    sets = held_out_sets(config, loaded, lengths[-1], seen)
    sets = chain([next(sets)], sets)
    launch = launch or Ranks()
    backend = serving_backend(
        config.backend, model, config.dtype, config.device, quiet=not launch.is_first
    )
    costs = None if config.measures_costs else flops(model, length=lengths[-1], dtype=config.dtype)
    if launch.is_first:
        check_storage(config.storage)
    candidates = {length: ladder(length) for length in lengths}
    # All that every unit depends on. Of files it holds names and contents, for paths differ between
    # machines.
    settings = {
        "version": _VERSION,
        "model": model.name,
        "weights": model.weights_sha256,
        "tasks": list(dict.fromkeys(parse_task(task).name for task in config.tasks)),
        "lengths": list(lengths),
        "prompts": digest([prompt for made in prompts.values() for prompt in made]),
        "dtype": config.dtype,
        "device": config.device.partition(":")[0],
        "backend": backend,
        "dense tails": list(config.tails),
        "candidates": hashlib.sha256(repr(sorted(candidates.items())).encode()).hexdigest()[:16],
    }
    with Ledger(config.out, "heads", settings=settings, fresh=config.fresh, ranks=launch) as ledger:
        search = _Search(
            config=config,
            loaded=loaded,
            model=model,
            launch=launch,
            ledger=ledger,
            searched=searched,
            prompts=prompts,
            seen=seen,
            backend=backend,
            candidates=candidates,
        )
        recorded = search.run(costs, sets)
        if launch.is_first:
            ledger.remove()
    return recorded


class _Search(Setup):
    """The phases."""

    def run(self, costs: Costs | None, held_out: Iterator[list[Prompt]]) -> Recorded | None:
        """All phases; what came of them in the first rank. held_out: sets of prompts."""
        curves: dict[int, Mapping[int, Curves]] = {}
        fault: str | None = None
        for length, made in self.prompts.items():
            calibration = self._reference(made)
            curves[length], found = score_prompts(self, length, calibration)
            fault = fault or found
        if fault and self.launch.is_first:
            print(
                f"no gradients ({fault}): heads are weighed by their change of the residual stream",
                file=sys.stderr,
            )
        costs = costs or self._measured_costs(calibration.sequences[0], curves[self.length])
        heads = self._heads(curves[self.length], costs)
        total, least = self._total(heads)
        trials = self._refined(heads, total, calibration)
        gate = Gate(
            heads=heads,
            limits=self.config.limits,
            measure=partial(self._losses, "held-out prompts"),
            sets=map(self._reference, held_out),
        )
        gated = gate.run(total, trials[0])
        if not self.launch.is_first:
            return None
        return record(
            Outcome(
                setup=self,
                budget=round(total / heads.total(1.0), 4),
                least=least,
                curves=curves,
                costs=costs,
                heads=heads,
                trials=tuple(trials),
                gated=gated,
                calibration=calibration.sequences,
                gradient_fault=fault,
            )
        )

    def _reference(self, prompts: Sequence[Prompt]) -> Reference:
        return Reference(
            self.loaded.model, sequences(prompts, self.loaded.tokenizer), backend=self.backend
        )

    def _measured_costs(self, one: TokenSequence, curves: Mapping[int, Curves]) -> Costs:
        """What candidates cost on this machine, which the first rank finds out while the others
        wait."""
        # The allocations that are timed follow from the curves and the budget.
        asked = {"sequence": one.digest, "share": self.config.share}
        with all_threads():
            unit = self.ledger.unit("times", {**asked, "machine": environment(self.config.device)})

        def find() -> dict[str, Any]:
            return measured(self, one.ids[: one.context], partial(self._heads, curves))

        found = self.ledger.once(unit, find) if self.launch.is_first else None
        return costs_of(
            self.launch.broadcast(found), self.model, length=self.length, dtype=self.config.dtype
        )

    def _heads(self, curves: Mapping[int, Curves], costs: Costs) -> Heads:
        return Heads(
            curves=curves,
            costs={tail: costs.of(self.patterns, one.tiles) for tail, one in curves.items()},
            all_keys=costs.all_keys(),
        )

    def _total(self, heads: Heads) -> tuple[float, str | None]:
        """The budget, and why it is more than the default, None where it is not."""
        share = self.config.share
        total = heads.total(share)
        least = min(heads.least(tail) for tail in heads.curves)
        if total > least * 1.01:
            return total, None
        said = f"the cheapest candidates cost {least / heads.total(1.0):.3f} of all of attention"
        if self.config.budget is not None:
            raise HeadwiseError(
                f"--budget {share:g} is impossible at {self.length} tokens: {said}; ask for a good "
                f"deal more, or a "
                "longer --length"
            )
        return max(1.01 * least, least + share * (heads.total(1.0) - least)), said

    def _refined(self, heads: Heads, total: float, calibration: Reference) -> list[Trial]:
        asked = Refinement(
            heads=heads,
            total=total,
            trials=self.config.n_trials,
            seed=self.config.seed,
            storage=self.config.storage,
            name=self.config.out.stem,
            quiet=not self.launch.is_first,
        )
        with phase(
            "refinement", self.config.n_trials, "trials", quiet=not self.launch.is_first
        ) as shown:
            return refine(asked, partial(self._losses, "", calibration), shown.reach)

    def _losses(
        self,
        called: str,
        reference: Reference,
        allocations: Sequence[Allocation],
        numbers: Sequence[int] | None = None,
    ) -> list[list[TaskLoss]]:
        """What allocations lose on a set of sequences, by task; what was measured before is not
        measured again.

        called: the phase's name; empty: it is part of another one. numbers: of the sequences that
        count; None: all."""
        found = reference.sequences
        ledger = self.ledger
        numbers = range(len(found)) if numbers is None else numbers
        asked = [(allocation, number) for allocation in allocations for number in numbers]
        units = [
            ledger.unit(
                "losses", {"allocation": allocation.digest, "sequence": found[number].digest}
            )
            for allocation, number in asked
        ]
        wanted = {unit.key: one for unit, one in zip(units, asked, strict=True)}

        def work(unit: Unit) -> dict[str, Any]:
            allocation, number = wanted[unit.key]
            return dict(vars(reference.losses(number, self.plans(allocation))))

        with phase(
            called, len(units), "passes", quiet=not (called and self.launch.is_first)
        ) as shown:
            # A dense pass takes about as long as one by patterns: a rank that has it is asked
            # first.
            costs = [float(len(found[number].ids)) for _, number in asked]
            needs = [str(number) for _, number in asked]
            values = ledger.run(
                units, work, costs=costs, needs=needs, has=reference.known, done=shown.reach
            )
        losses = [Losses(**value) for value in values]
        some = [found[number] for number in numbers]
        return [
            by_task(some, losses[at : at + len(some)]) for at in range(0, len(losses), len(some))
        ]
