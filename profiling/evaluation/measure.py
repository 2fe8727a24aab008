"""Quality of many methods on many tasks and lengths, each prompt under each method once.

Finished prompts are not run again: tasks, lengths, samples and methods can be added, and a killed
run resumes at the prompt in progress.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from artifacts import Artifact, HeadwiseError
from artifacts.store.hashing import canonical_json
from profiling.evaluation.config import ALL_TASKS, GRID, Evaluation
from profiling.evaluation.methods import Methods
from profiling.evaluation.rows import Row, rows_of
from profiling.finite import check_finite
from profiling.ledger import Ledger, Unit
from profiling.models.identity import identity_of
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, phase
from profiling.prompts.held_out import Seen, seeded_prompts
from profiling.prompts.prompt import KINDS, Prompt, parse_task, per_context
from profiling.quality.contexts import by_context
from profiling.quality.method import Method
from profiling.quality.sequences import kl_divergence
from profiling.quality.trials import VERSION, context_log_probs, trials
from profiling.speed.baselines import MODEL

OUTPUT = "evaluation.json"


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


class Measured(NamedTuple):
    """Results of an evaluation.

    Attributes:
        rows: by length, task, depth and method.
        seen_by_search: of each task and length whose prompts the search had seen how many.
    """

    rows: list[Row]
    seen_by_search: list[dict[str, Any]]


def tasks_of(names: Sequence[str]) -> tuple[str, ...]:
    """The tasks that were asked for; `all` are those that need no file."""
    free = tuple(kind.name for kind in KINDS.values() if kind.takes_file != "must")
    return tuple(
        dict.fromkeys(task for name in names for task in (free if name == ALL_TASKS else (name,)))
    )


def check_lengths(artifact: Artifact, lengths: Sequence[int]) -> None:
    """Reject lengths that the artifact serves densely or that the model was not trained for."""
    for length in lengths:
        if length < artifact.prefill.dense_below and any(artifact.prefill.layers):
            raise HeadwiseError(
                f"--length {length} is below the artifact's dense_below of "
                f"{artifact.prefill.dense_below}, so it "
                "would be served densely: ask for longer prompts"
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
            sampled = seeded_prompts(
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
                    prompts=tuple(sampled.prompts),
                    overlapping=sampled.overlapping,
                )
            )
    return sets


def open_ledger(folder: Path, loaded: LoadedModel, *, fresh: bool) -> Ledger:
    """Open the resume file of all evaluations in a folder; it stays for later runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadwiseError(f"cannot make the folder {folder}: {error.strerror}") from None
    model = identity_of(loaded.model, loaded.name)
    return Ledger(folder / OUTPUT, "evaluate", model, fresh=fresh)


def evaluate(config: Evaluation, loaded: LoadedModel, methods: Methods, ledger: Ledger) -> Measured:
    """Run every prompt under every method that the resume file lacks."""
    sets = [
        each
        for length in config.lengths
        for each in prompt_sets(config, loaded.tokenizer, length, methods.seen)
    ]
    of = _Units(ledger)
    total = len(config.methods) * sum(each.length * len(each.prompts) for each in sets)
    rows: list[Row] = []
    # In prompt tokens: they are what takes time.
    with phase("evaluation", total, "tokens") as shown:
        for length in config.lengths:
            here = [each for each in sets if each.length == length]
            built = [methods.make(name, length) for name in config.methods]
            _run(loaded, built, here, of, ledger, shown)
            for each in here:
                for method in built:
                    records = [ledger.get(of(method, prompt)) for prompt in each.prompts]
                    rows += _rows(each, method, records, config.seeds)
    return Measured(rows, _seen_by_search(sets))


def _run(
    loaded: LoadedModel,
    methods: Sequence[Method],
    sets: Sequence[Set],
    of: _Units,
    ledger: Ledger,
    shown: Phase,
) -> None:
    """Run each context under each method that lacks it, dense attention first."""
    placed = [(each, prompt) for each in sets for prompt in each.prompts]
    for numbers in by_context([prompt for _, prompt in placed]):
        first = placed[numbers[0]][0]
        prompts = [placed[number][1] for number in numbers]
        tokens = first.length * len(numbers)
        expected: Tensor | None = None
        for method in methods:
            # By key: equal prompts of several depths are run once.
            units = {of(method, prompt).key: prompt for prompt in prompts}
            left = [prompt for prompt in units.values() if of(method, prompt) not in ledger]
            if not left:
                shown.skip(tokens)
                continue
            shown.note(f"{method.name} {first.task} {first.length}")
            is_dense = method.name == MODEL
            if expected is None and not is_dense and not method.evicts:
                with methods[0].asked(loaded.model):
                    expected = context_log_probs(loaded.model, left[0].context)
            with method.asked(loaded.model):
                for trial in trials(loaded.model, loaded.tokenizer, left, method):
                    record = trial.record
                    if is_dense:
                        expected = trial.log_probs
                    elif expected is not None and trial.log_probs is not None:
                        divergence = kl_divergence(expected, trial.log_probs)
                        record = {**record, "kl": max(float(divergence.mean()), 0.0)}
                    for name, value in record.items():
                        if value is not None and name != "text":
                            what = (
                                f"{first.task}, {first.length} tokens: {name} of {method.name} is"
                            )
                            check_finite(value, what, loaded.model)
                    ledger.put(of(method, left[trial.number]), record)
            shown.update(tokens)


def _rows(
    prompt_set: Set, method: Method, records: Sequence[Mapping[str, Any]], seeds: int
) -> Iterator[Row]:
    """Rows of a method's records on a set, prompt by prompt, as many of each seed."""
    units = _units(prompt_set)
    each = len(prompt_set.prompts) // seeds
    for at, (prompt, record) in enumerate(zip(prompt_set.prompts, records, strict=True)):
        yield from rows_of(
            record,
            task=prompt_set.task,
            length=prompt_set.length,
            method=method.name,
            prompt=f"{prompt_set.depth}/{at}",
            unit=units[at],
            seed=at // each,
            questions=len(prompt.scored) or 1,
            depth=prompt_set.depth,
        )


def _units(prompt_set: Set) -> list[str]:
    """Name the unit of each prompt: its context, or in a grid its number, the same at all depths.

    Every method has the same, which may have run on fewer prompts.
    """
    units = [""] * len(prompt_set.prompts)
    for number, group in enumerate(by_context(prompt_set.prompts)):
        for at in group:
            if prompt_set.depth is None:
                ids = array("i", prompt_set.prompts[at].context).tobytes()
                units[at] = f"{prompt_set.task}/{hashlib.sha256(ids).hexdigest()}"
            else:
                units[at] = f"{prompt_set.task}/{number}"
    return units


def _seen_by_search(sets: Sequence[Set]) -> list[dict[str, Any]]:
    """Count the prompts of each task and length that the search had seen, where any."""
    counts: dict[tuple[str, int], list[int]] = {}
    for each in sets:
        count = counts.setdefault((each.task, each.length), [0, 0])
        count[0] += each.overlapping
        count[1] += len(each.prompts)
    return [
        {"task": task, "length": length, "overlapping": overlapping, "samples": samples}
        for (task, length), (overlapping, samples) in counts.items()
        if overlapping
    ]


class _Units:
    """A prompt under a method as a unit of the ledger: by all that its record depends on."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __call__(self, method: Method, prompt: Prompt) -> Unit:
        fields = {**asdict(prompt), "finds": None, "text_spans": None, "task": None}
        digest = hashlib.sha256(canonical_json(fields)).hexdigest()[:16]
        return self._ledger.unit(
            f"trial/{VERSION}/{method.name}.{method.identity}/{len(prompt.input_ids)}/{digest}"
        )
