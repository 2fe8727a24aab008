"""Quality of many methods on many tasks and lengths, each prompt under each method once.

What is finished is not run again: tasks, lengths, samples and methods can be added, and a run
that was killed goes on with the prompt that it was at.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from artifacts import Artifact, HeadwiseError
from artifacts.store.hashing import canonical_json
from profiling.evaluation.config import ALL_TASKS, GRID, Evaluation
from profiling.evaluation.methods import Methods
from profiling.inside.head_fidelity import recall
from profiling.ledger import Ledger, Unit
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, phase
from profiling.prompts.held_out import Seen, seeded_prompts
from profiling.prompts.prompt import KINDS, Prompt, parse_task, per_context
from profiling.prompts.tokens import Ids
from profiling.quality.contexts import by_context
from profiling.quality.method import Method
from profiling.quality.sequences import Reference, sequences
from profiling.quality.trials import VERSION, trials
from profiling.speed.baselines import MODEL
from runtime.layers import make_plans

# Raised where the same prompt under the same method would give another record of its agreement with
# dense attention.
_AGREEMENT = 2
OUTPUT = "evaluation.json"
# Of each record: the unit that prompts share which are no samples of their own, its seed, its
# number of questions.
UNIT = "unit"
SEED = "seed"
QUESTIONS = "questions"


@dataclass(frozen=True, kw_only=True)
class Set:
    """Prompts of one task at one length.

    Attributes:
        depth: the place in the grid, None without one.
        overlapping: how many of the prompts the artifact's search has seen, for want of others.
    """

    task: str
    length: int
    depth: float | None
    prompts: tuple[Prompt, ...]
    overlapping: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Records of profiling.quality.trials of a method on a set, prompt by prompt.

    Attributes:
        seeds: how many they are of, as many prompts of each, one seed after the other.
    """

    task: str
    length: int
    depth: float | None
    method: str
    records: tuple[dict[str, Any], ...]
    overlapping: int = 0
    prompts: tuple[Prompt, ...] = ()
    seeds: int = 1


def tasks_of(names: Sequence[str]) -> tuple[str, ...]:
    """The tasks that were asked for; `all` are those that need no file."""
    free = tuple(kind.name for kind in KINDS.values() if kind.takes_file != "must")
    return tuple(
        dict.fromkeys(task for name in names for task in (free if name == ALL_TASKS else (name,)))
    )


def check_lengths(artifact: Artifact, lengths: Sequence[int]) -> None:
    """Refuse what the artifact would serve densely, or the model was not trained for."""
    for length in lengths:
        if length < artifact.prefill.dense_below and any(artifact.prefill.layers):
            raise HeadwiseError(
                f"--length {length} is below the artifact's dense_below of "
                f"{artifact.prefill.dense_below}, so it "
                "would be served densely: ask for longer prompts, or for the patterns all the same "
                "with --sparse-always"
            )
        if length > artifact.model.max_positions:
            raise HeadwiseError(
                f"--length {length} is more than the {artifact.model.max_positions} positions of "
                f"{artifact.model.name}"
            )


def prompt_sets(config: Evaluation, tokenizer: Any, length: int, seen: Seen) -> list[Set]:
    """Make all prompts of one length; windows of texts are unseen ones as far as there are any."""
    sets = []
    for name in config.tasks:
        task = parse_task(name)
        gridded = task.kind == GRID and not any(
            parameter == "depth" for parameter, _ in task.parameters
        )
        depths: tuple[float | None, ...] = (None,)
        if gridded:
            depths = config.depths
        for depth in depths:
            placed = task
            if depth is not None:
                placed = replace(task, parameters=(*task.parameters, ("depth", depth)))
            made = seeded_prompts(
                placed,
                tokenizer,
                length=length,
                samples=config.samples * per_context(placed),
                seeds=range(config.seed, config.seed + config.seeds),
                seen=seen,
            )
            sets.append(
                Set(
                    task=task.name,
                    length=length,
                    depth=depth,
                    prompts=tuple(made.prompts),
                    overlapping=made.overlapping,
                )
            )
    return sets


def open_ledger(folder: Path, *, fresh: bool) -> Ledger:
    """Open the resume file of all evaluations in a folder; it stays for later runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(f"cannot make the folder {folder}: {error.strerror}") from None
    return Ledger(folder / OUTPUT, "evaluate", fresh=fresh)


def evaluate(
    config: Evaluation, loaded: LoadedModel, methods: Methods, ledger: Ledger
) -> list[Outcome]:
    """Run every prompt under every method that the resume file lacks.

    Outcomes come by length, task, depth and method.
    """
    sets = [
        each
        for length in config.lengths
        for each in prompt_sets(config, loaded.tokenizer, length, methods.seen)
    ]
    of = _Units(ledger, methods.artifact, loaded, f"trial/{VERSION}")
    total = len(config.methods) * sum(each.length * len(each.prompts) for each in sets)
    if config.fidelity:
        total += sum(map(len, _contexts(sets)))
    outcomes = []
    # In prompt tokens: they are what takes time.
    with phase("evaluation", total, "tokens") as shown:
        for length in config.lengths:
            here = [each for each in sets if each.length == length]
            made = [methods.make(name, length) for name in config.methods]
            for method in made:
                _run(loaded, method, here, of, ledger, shown)
            like = None
            if config.fidelity:
                like = _Units(ledger, methods.artifact, loaded, f"agreement/{_AGREEMENT}")
                _agreement(loaded, made, here, like, ledger, shown)
            outcomes += [
                Outcome(
                    task=each.task,
                    length=length,
                    depth=each.depth,
                    method=method.name,
                    records=_records(each, method, made[0], ledger, of, like),
                    overlapping=each.overlapping,
                    prompts=each.prompts,
                    seeds=config.seeds,
                )
                for each in here
                for method in made
            ]
    return outcomes


def _run(
    loaded: LoadedModel,
    method: Method,
    sets: Sequence[Set],
    of: _Units,
    ledger: Ledger,
    shown: Phase,
) -> None:
    left = []
    for each in sets:
        for prompt in each.prompts:
            if (unit := of(method, prompt)) in ledger:
                shown.skip(each.length)
            else:
                left.append((each, prompt, unit))
    if not left:
        return
    with method.asked(loaded.model):
        for numbers in by_context([prompt for _, prompt, _ in left]):
            shared = [left[number] for number in numbers]
            shown.note(f"{method.name} {shared[0][0].task} {shared[0][0].length}")
            new = {unit.key: (unit, prompt) for _, prompt, unit in shared if unit not in ledger}
            units = [unit for unit, _ in new.values()]
            for number, record in trials(
                loaded.model, loaded.tokenizer, [p for _, p in new.values()], method
            ):
                ledger.put(units[number], record)
            shown.update(sum(each.length for each, _, _ in shared))


def _compares(method: Method) -> bool:
    """True if the method's prefill differs from dense attention's; evicting caches do not."""
    return method.name != MODEL and not method.evicts


def _contexts(sets: Sequence[Set]) -> dict[Ids, Prompt]:
    """A prompt of each context."""
    return {prompt.context: prompt for each in sets for prompt in each.prompts}


def _agreement(
    loaded: LoadedModel,
    methods: Sequence[Method],
    sets: Sequence[Set],
    of: _Units,
    ledger: Ledger,
    shown: Phase,
) -> None:
    """Measure the agreement of each method with dense attention on each context."""
    compared = [method for method in methods if _compares(method)]
    for prompt in _contexts(sets).values():
        shown.note(f"fidelity {prompt.task} {len(prompt.context)}")
        context = _context(prompt)
        missing = [method for method in compared if of(method, context) not in ledger]
        if missing:
            reference = Reference(loaded.model, sequences([context], loaded.tokenizer))
            plans = {
                method.name: make_plans(method.headwise.artifact)
                for method in missing
                if method.headwise is not None
            }
            kept = recall(loaded.model, prompt, plans)
            for method in missing:
                agreement = reference.agreement(0, method.apply(loaded.model))
                record = {**asdict(agreement), "recall": kept.get(method.name)}
                ledger.put(of(method, context), record)
        shown.update(len(prompt.context))


def _context(prompt: Prompt) -> Prompt:
    """Keep of a prompt its context and the answers inside it, which are compared."""
    return Prompt(prompt.context, None, scored=prompt.scored, labels=prompt.labels)


def _records(
    prompt_set: Set, method: Method, dense: Method, ledger: Ledger, of: _Units, like: _Units | None
) -> tuple[dict[str, Any], ...]:
    """Read a method's records on a set, with its agreement with dense where that was asked for."""
    records = [dict(ledger.get(of(method, prompt))) for prompt in prompt_set.prompts]
    if like is None or method is dense:
        return tuple(records)
    if _compares(method):
        near = [ledger.get(like(method, _context(prompt))) for prompt in prompt_set.prompts]
        records = [{**record, **other} for record, other in zip(records, near, strict=True)]
    return tuple(
        as_dense(
            prompt_set.prompts,
            records,
            [ledger.get(of(dense, prompt)) for prompt in prompt_set.prompts],
        )
    )


def as_dense(
    prompts: Sequence[Prompt],
    records: Sequence[Mapping[str, Any]],
    dense: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Add `as_dense` to records with an answer after the prompt: 1 where its text is dense's."""
    joined = []
    for prompt, own, other in zip(prompts, records, dense, strict=True):
        record = dict(own)
        if not prompt.scored and "text" in own:
            record["as_dense"] = float(own["text"] == other["text"])
        joined.append(record)
    return joined


def _units(outcome: Outcome) -> Iterator[tuple[Any, ...]]:
    """Identify the unit of each record: its context, or in a grid its number at all depths."""
    places = {
        at: number for number, group in enumerate(by_context(outcome.prompts)) for at in group
    }
    for at in range(len(outcome.records)):
        if outcome.depth is None and outcome.prompts:
            ids = array("i", outcome.prompts[at].context).tobytes()
            yield outcome.task, hashlib.sha256(ids).hexdigest()
        else:
            yield outcome.task, places.get(at, at)


class _Units:
    """A prompt under a method as a unit of the ledger: by all that its record depends on."""

    def __init__(
        self, ledger: Ledger, artifact: Artifact, loaded: LoadedModel, record: str
    ) -> None:
        self._ledger = ledger
        weights = (artifact.model.weights_sha256 or artifact.model.name)[:16]
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        self._before = f"{record}/{weights}/{dtype}/{loaded.model.device.type}"

    def __call__(self, method: Method, prompt: Prompt) -> Unit:
        fields = {**asdict(prompt), "finds": None, "text_spans": None, "task": None}
        digest = hashlib.sha256(canonical_json(fields)).hexdigest()[:16]
        return self._ledger.unit(
            f"{self._before}/{method.name}.{method.identity}/{len(prompt.input_ids)}/{digest}"
        )


def groups(
    outcomes: Sequence[Outcome],
) -> Iterator[tuple[str, int, dict[str, list[dict[str, Any]]]]]:
    """(task, length, records by method), depths together.

    Each record says its UNIT: prompts of one context, and the same thing at several depths, are
    one. It is the same under every method, which may have run on fewer of them. And the number of
    its SEED, and its QUESTIONS: answers inside a prompt count one by one."""
    by_place: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for outcome in outcomes:
        methods = by_place.setdefault((outcome.task, outcome.length), {})
        each = len(outcome.records) // outcome.seeds
        own = methods.setdefault(outcome.method, [])
        for at, (record, unit) in enumerate(zip(outcome.records, _units(outcome), strict=True)):
            if outcome.prompts:
                scored = outcome.prompts[at].scored
            else:
                scored = ()
            own.append({**record, UNIT: unit, SEED: at // each, QUESTIONS: len(scored) or 1})
    for (task, length), methods in by_place.items():
        yield task, length, methods
