"""The search with one budget for the whole model: curves of every head, spent where they save most, proven end to end.

1. Curves: each calibration prompt is one dense pass forth and back, on which every head tries every candidate.
2. Costs: candidates are timed on the layers of a real prompt, or counted in FLOPs.
3. Allocation: for a budget the best by the curves, exactly; refinement tries it on the calibration prompts.
4. Gate: held-out prompts; where a task loses more than allowed, there is more budget, and other prompts report.

All ranks of a launch by torchrun share 1, 3 and 4. What is finished is in the ledger beside the output.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from artifacts import Artifact, Finding, HeadwiseError, ModelInfo
from artifacts.files import check_writable
from kernels.patterns import Pattern
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import phase
from profiling.prompts.held_out import SETS, Seen, held_out
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task, per_context
from profiling.quality.sequences import Losses, Reference, TokenSequence, check_logits, sequences
from profiling.ranks import Ranks, ranks
from profiling.speed.cost_table import Cost, CostTable
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, sliding_layers
from search.common.serving import serving_backend
from search.model.allocation import Allocation, Heads
from search.model.candidates import ladder
from search.model.config import ModelSearch
from search.model.costs import Costs, costs_by, given_costs
from search.model.curves import Curves
from search.model.gate import TaskLoss, by_task
from search.model.record import Gated, Outcome, Point, write
from search.model.refine import Refinement, Trial, check_storage, refine
from search.model.scored_prompts import Scoring, score_prompts
from search.model.timing import line_through, time_candidates, time_layers

# What a length at most is where none is asked for: beyond it a search takes long, and sizes go with the length.
_LONGEST = 8192
# Budgets of the front's other points, as shares of what is spent.
_FRONT = (0.5, 2.0)
# Where the gate fails: so many times the budget, least and most, so often.
_STEPS, _ROUNDS = (1.25, 2.0), 8
# What such a step is to come to, as a share of the limit; losses fall with this power of the budget (SmolLM2: 3.8).
_AIM, _POWER = 0.8, 4
# Layers on which allocations are timed to see what mixing kinds of patterns adds.
_TIMED = 6
# Raised where the same unit would have another value.
_VERSION = 1


def run(config: ModelSearch) -> Artifact | None:
    """Search, and write `config.out` with its sidecar; None in ranks after the first, which help.

    Raises:
        HeadwiseError: anything the user has to put right, or the gate, that nothing passes; no file is written then.
    """
    # What is not installed is said before any work.
    if config.n_trials > 1 or config.storage:
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
) -> Artifact | None:
    """The search on a model that is loaded and fingerprinted."""
    check_logits(loaded.model)
    modules = attention_layers(loaded.model)
    searched = tuple(sorted(set(modules) - sliding_layers(modules)))
    if not searched:
        raise HeadwiseError(f"every layer of {model.name} slides over a window already: nothing to search")
    if model.num_heads % config.tensor_parallel:
        raise HeadwiseError(
            f"--tensor-parallel {config.tensor_parallel} does not divide the {model.num_heads} query heads of "
            f"{model.name}"
        )
    lengths = _lengths(config, model)
    prompts = {length: _calibration(config, loaded, length) for length in lengths}
    seen = Seen(prompt for made in prompts.values() for prompt in made)
    # Before any work: a text that is too short to hold prompts out is the user's to know of now.
    first = _held_out(config, loaded, lengths[-1], seen, 0)
    launch = launch or Ranks()
    backend = serving_backend(config.backend, model, config.dtype, config.device, quiet=not launch.is_first)
    costs = given_costs(config.cost, model, length=lengths[-1], dtype=config.dtype, table=config.cost_table)
    if launch.is_first:
        check_storage(config.storage)
    found = _Search(config, loaded, model, launch, searched, prompts, seen, backend)
    with Ledger(config.out, "heads", settings=found.settings, fresh=config.fresh, ranks=launch) as ledger:
        artifact = found.run(ledger, costs, first)
        if launch.is_first:
            ledger.remove()
    return artifact


class _Search:
    """One search as a rank runs it."""

    def __init__(
        self,
        config: ModelSearch,
        loaded: LoadedModel,
        model: ModelInfo,
        launch: Ranks,
        searched: tuple[int, ...],
        prompts: Mapping[int, list[Prompt]],
        seen: Seen,
        backend: str,
    ) -> None:
        self.config, self.loaded, self.model, self.launch = config, loaded, model, launch
        self.searched, self.prompts, self.seen, self.backend = searched, prompts, seen, backend
        self.length = max(prompts)
        self.candidates: dict[int, tuple[Pattern, ...]] = {length: ladder(length) for length in prompts}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that every unit depends on. Of files it holds names and contents, for paths differ between machines."""
        everything = [prompt for made in self.prompts.values() for prompt in made]
        return {
            "version": _VERSION,
            "model": self.model.name,
            "weights": self.model.weights_sha256,
            "tasks": list(dict.fromkeys(parse_task(task).name for task in self.config.tasks)),
            "lengths": list(self.prompts),
            "prompts": digest(everything),
            "dtype": self.config.dtype,
            "device": self.config.device.partition(":")[0],
            "backend": self.backend,
            "dense tails": list(self.config.tails),
            "candidates": hashlib.sha256(repr(sorted(self.candidates.items())).encode()).hexdigest()[:16],
        }

    def run(self, ledger: Ledger, costs: Costs | None, first: list[Prompt]) -> Artifact | None:
        """All phases; the artifact in the first rank."""
        curves: dict[int, Mapping[int, Curves]] = {}
        faults = []
        for length, made in self.prompts.items():
            reference = self._reference(made)
            scored = score_prompts(self._scoring(ledger, length), reference)
            curves[length] = scored.curves
            faults += [scored.fault] if scored.fault else []
        if faults and self.launch.is_first:
            print(
                f"no gradients ({faults[0]}): heads are weighed by their change of the residual stream", file=sys.stderr
            )
        calibration = reference
        costs = costs or self._measured_costs(ledger, calibration.sequences[0], curves[self.length])
        heads = self._heads(curves[self.length], costs)
        total = self._total(heads)
        trials = self._refined(ledger, heads, total, calibration)
        gated = self._gate(ledger, heads, total, trials[0], calibration, first)
        if not self.launch.is_first:
            return None
        return write(
            Outcome(
                config=self.config,
                loaded=self.loaded,
                model=self.model,
                backend=self.backend,
                searched=self.searched,
                candidates=self.candidates,
                curves=curves,
                costs=costs,
                heads=heads,
                total=total,
                trials=tuple(trials),
                gated=gated,
                calibration=calibration.sequences,
                calibration_sha256=self.settings["prompts"],
                seen=self.seen,
                gradient_fault=faults[0] if faults else None,
            )
        )

    def _reference(self, prompts: Sequence[Prompt]) -> Reference:
        return Reference(self.loaded.model, sequences(prompts, self.loaded.tokenizer), backend=self.backend)

    def _scoring(self, ledger: Ledger, length: int) -> Scoring:
        return Scoring(
            loaded=self.loaded,
            ledger=ledger,
            ranks=self.launch,
            layers=self.searched,
            num_layers=self.model.num_layers,
            candidates=self.candidates[length],
            tails=self.config.tails,
            backend=self.backend,
        )

    def _measured_costs(self, ledger: Ledger, one: TokenSequence, curves: Mapping[int, Curves]) -> Costs:
        """What candidates cost on this machine: kinds by their tiles, and what mixing them in a layer adds."""
        ids = one.ids[: one.context]

        def find() -> dict[str, Any]:
            with phase("timing candidates", 2, "passes") as shown:
                table = time_candidates(
                    self.loaded,
                    ids,
                    self.candidates[self.length],
                    self.searched,
                    dtype=self.config.dtype,
                    command=self.config.command or "search.heads",
                    backend=self.backend,
                )
                shown.update()
                costs = costs_by(table, self.model, length=self.length, dtype=self.config.dtype)
                fit = self._fit(costs, curves, ids)
                shown.update()
            return {**vars(table), "costs": [vars(cost) for cost in table.costs], "fit": list(fit)}

        unit = ledger.unit("times", {"sequence": one.digest, "table": self.config.cost})
        found = ledger.once(unit, find) if self.launch.is_first else None
        found = dict(self.launch.broadcast(found))
        scale, overhead = found.pop("fit")
        table = CostTable(**found | {"costs": tuple(Cost(**cost) for cost in found["costs"])})
        costs = costs_by(table, self.model, length=self.length, dtype=self.config.dtype)
        return costs.brought_to(scale=scale, overhead=overhead)

    def _fit(self, costs: Costs, curves: Mapping[int, Curves], ids: Sequence[int]) -> tuple[float, float]:
        """(factor, seconds of each head) between what the table predicts and what mixed layers take."""
        heads = self._heads(curves, costs)
        tail = min(heads.curves)
        least = heads.least(tail) * (1 + 1e-9)
        made = [heads.by_model(max(heads.total(self.config.budget * share), least), tail) for share in (0.5, 1.0, 2.0)]
        plans = {str(i): one.plans(self.candidates[self.length], self.model.num_kv_heads) for i, one in enumerate(made)}
        timings = time_layers(self.loaded, ids, plans, self.searched, layers=_TIMED, backend=self.backend, turns=2)
        # Of the layers that are timed: an allocation gives each layer another share.
        each = len(self.searched) / len(timings.layers)
        predicted = [each * float(one.pick(heads.costs[tail])[list(timings.layers)].sum()) for one in made]
        scale, overhead = line_through(predicted, [timings.seconds[name] for name in plans])
        return scale, overhead / (len(self.searched) * self.model.num_heads)

    def _heads(self, curves: Mapping[int, Curves], costs: Costs) -> Heads:
        candidates = self.candidates[self.length]
        return Heads(
            curves=curves,
            costs={tail: costs.of(candidates, one.tiles) for tail, one in curves.items()},
            all_keys=costs.all_keys(),
            ranks=self.config.tensor_parallel,
        )

    def _total(self, heads: Heads) -> float:
        total, least = heads.total(self.config.budget), min(heads.least(tail) for tail in heads.curves)
        if total <= least * 1.01:
            raise HeadwiseError(
                f"--budget {self.config.budget:g} is impossible at {self.length} tokens: the cheapest candidates cost "
                f"{least / heads.total(1.0):.3f} of all of attention; ask for a good deal more, or a longer --length"
            )
        return total

    def _refined(self, ledger: Ledger, heads: Heads, total: float, calibration: Reference) -> list[Trial]:
        asked = Refinement(
            heads=heads,
            total=total,
            last_qs=[getattr(pattern, "last_q", 0) for pattern in self.candidates[self.length]],
            trials=self.config.n_trials,
            seed=self.config.seed,
            storage=self.config.storage,
            name=self.config.out.stem,
            quiet=not self.launch.is_first,
        )
        with phase("refinement", self.config.n_trials, "trials", quiet=not self.launch.is_first) as shown:
            return refine(asked, lambda some: self._measured(ledger, calibration, some), shown.reach)

    def _measured(
        self, ledger: Ledger, reference: Reference, allocations: Sequence[Allocation], *, called: str = ""
    ) -> list[list[TaskLoss]]:
        """What allocations lose on a set of sequences, by task; what was measured before is not measured again.

        called: the phase's name; empty: it is part of another one.
        """
        wanted: dict[str, tuple[Allocation, int]] = {}
        units: list[Unit] = []
        for allocation in allocations:
            for number, one in enumerate(reference.sequences):
                unit = ledger.unit("losses", {"allocation": allocation.digest, "sequence": one.digest})
                units.append(unit)
                wanted[unit.key] = allocation, number

        def work(unit: Unit) -> dict[str, Any]:
            allocation, number = wanted[unit.key]
            plans = allocation.plans(self.candidates[self.length], self.model.num_kv_heads)
            return dict(vars(reference.losses(number, plans)))

        with phase(called, len(units), "passes", quiet=not (called and self.launch.is_first)) as shown:
            values = ledger.run(
                units, work, costs=[len(reference.sequences[wanted[u.key][1]].ids) for u in units], done=shown.reach
            )
        each = len(reference.sequences)
        return [
            by_task(reference.sequences, [Losses(**value) for value in values[at : at + each]])
            for at in range(0, len(values), each)
        ]

    def _gate(
        self,
        ledger: Ledger,
        heads: Heads,
        total: float,
        best: Trial,
        calibration: Reference,
        first: list[Prompt],
    ) -> Gated:
        """Held-out prompts judge what is served, and the points beside it.

        Where a task loses too much there is more budget: by the calibration prompts first, then by a set of held-out
        ones. A set that raised it does not report on it, as long as there are others.
        """
        like, limits, sets = best.allocation, self.config.limits, self._sets(first)
        chosen, spent, rounds, said, chosen_on = Point(allocation=like, tasks=best.tasks), total, 0, None, None
        reference, reports = calibration, False
        while True:
            fault = limits.fault(chosen.tasks)
            if fault is not None:
                said = said or fault
                if rounds == _ROUNDS or spent >= heads.total(1.0):
                    raise Finding(
                        f"the gate: {fault}, with {chosen.allocation.cost / total:.2f} times the budget; "
                        "ask for a larger --budget or allow more"
                    )
                rounds += 1
                # As much as all of attention costs is the last thing to try.
                step = float(np.clip((limits.strain(chosen.tasks) / _AIM) ** (1 / _POWER), *_STEPS))
                spent = min(spent * step, heads.total(1.0))
                more = self._other(heads, like, spent, like.tail)
                assert more is not None, "it is more than what was spent before"
                chosen, reports = replace(chosen, allocation=more), False
                chosen_on = None if reference is calibration else reference
            elif not reports and (following := next(sets, None)) is not None:
                reference, reports = following, True
            else:
                break
            called = "calibration prompts" if reference is calibration else "held-out prompts"
            (chosen,) = self._points(ledger, reference, [chosen.allocation], called)
        beside = [self._other(heads, like, spent * share, like.tail) for share in _FRONT]
        beside += [self._other(heads, like, spent, tail) for tail in heads.curves if tail != like.tail]
        others = {one.digest: one for one in beside if one is not None and one.digest != chosen.allocation.digest}
        points = [chosen, *self._points(ledger, reference, list(others.values()), "held-out prompts")]
        if said is not None and self.launch.is_first:
            more_than = chosen.allocation.cost / total
            print(f"the gate: {said}; with {more_than:.2f} times the budget it passes", file=sys.stderr)
        return Gated(
            chosen=chosen,
            points=tuple(points),
            rounds=rounds,
            fault=said,
            chosen_on=None if chosen_on is None else chosen_on.sequences,
            reported_on=reference.sequences,
        )

    def _other(self, heads: Heads, like: Allocation, total: float, tail: int) -> Allocation | None:
        """The same weights with another total or dense tail; None where that is less than the cheapest candidates."""
        if total <= heads.least(tail):
            return None
        return heads.by_model(total, tail, weight=like.weight, kinds=like.kinds or None)

    def _points(
        self, ledger: Ledger, reference: Reference, allocations: Sequence[Allocation], called: str
    ) -> list[Point]:
        found = self._measured(ledger, reference, allocations, called=called)
        return [Point(allocation=one, tasks=tuple(tasks)) for one, tasks in zip(allocations, found, strict=True)]

    def _sets(self, first: list[Prompt]) -> Iterator[Reference]:
        """Sets of held-out prompts, each unlike those before, as far as texts have any."""
        for number in range(SETS - 1):
            try:
                made = first if not number else _held_out(self.config, self.loaded, self.length, self.seen, number)
            except HeadwiseError:
                return
            for prompt in made:
                self.seen.add(prompt)
            yield self._reference(made)


def _lengths(config: ModelSearch, model: ModelInfo) -> tuple[int, ...]:
    """Ascending, each once."""
    lengths = tuple(sorted(set(config.lengths or (min(_LONGEST, model.max_positions),))))
    if lengths[-1] > model.max_positions and not config.beyond_positions:
        raise HeadwiseError(
            f"--length {lengths[-1]} is more than the {model.max_positions} positions of {model.name}; "
            "choose a shorter one, or pass --beyond-positions to go past what the model was trained on"
        )
    return lengths


def _calibration(config: ModelSearch, loaded: LoadedModel, length: int) -> list[Prompt]:
    """All calibration prompts of one length."""
    found: list[Prompt] = []
    names: set[str] = set()
    for task in dict.fromkeys(config.tasks):
        name = parse_task(task).name
        if name in names:
            raise HeadwiseError(f"--task has two tasks {name}: give their files different names")
        names.add(name)
        # Whole contexts, with all questions that share one.
        count = config.samples * per_context(task)
        found += make_prompts(task, loaded.tokenizer, length=length, samples=count, seed=config.seed)
    return found


def _held_out(config: ModelSearch, loaded: LoadedModel, length: int, seen: Seen, number: int) -> list[Prompt]:
    how: dict[str, Any] = {"length": length, "samples": config.samples, "seed": config.seed}
    return held_out(config.tasks, loaded.tokenizer, **how, seen=seen, number=number)
