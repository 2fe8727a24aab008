"""Quality of many methods on many tasks and lengths, each prompt under each method once.

Finished prompts are not run again: tasks, lengths, samples and methods can be added, and a killed
run resumes at the prompt in progress.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from artifacts import Artifact, HeadwiseError
from artifacts.errors import reason, shorten
from artifacts.store.hashing import canonical_json
from profiling.evaluation.config import GRID, Evaluation
from profiling.evaluation.methods import Methods
from profiling.evaluation.rows import Row, rows_of
from profiling.finite import check_finite
from profiling.ledger import Ledger, Unit
from profiling.models.identity import identity_of
from profiling.models.loading import LoadedModel
from profiling.progress import Phase, phase
from profiling.prompts.held_out import Overlap, Seen, is_seed_of_search, seeded_prompts, units
from profiling.prompts.prompt import Fewer, Prompt, Task, distinct, per_context
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
        prompts: of all seeds; fewer than `samples` if the task's text has no more.
        seeds: the number of each prompt's seed.
        digests: of each prompt, by all that an answer depends on.
        samples: how many prompts were asked for.
        overlapping: how many of the prompts the artifact's search has seen, for want of others.
    """

    task: str
    length: int
    depth: float | None
    prompts: tuple[Prompt, ...]
    seeds: tuple[int, ...]
    digests: tuple[str, ...]
    samples: int
    overlapping: int = 0


class Measured(NamedTuple):
    """Results of an evaluation.

    Attributes:
        rows: by length, task, depth and method.
        seen_by_search, fewer_prompts: of each task and length with such prompts.
    """

    rows: list[Row]
    seen_by_search: list[Overlap]
    fewer_prompts: list[Fewer]


def tasks_of(tasks: Sequence[Task], text: Task | None) -> tuple[Task, ...]:
    """The tasks that were asked for, each once.

    Args:
        tasks: of any kinds.
        text: the haystack of each GRID task that names no file, and a task of its own.

    Raises:
        HeadwiseError: two tasks have one name.
    """
    asked = list(tasks)
    if text is not None:
        asked = [
            replace(task, file=text.file) if task.kind == GRID and task.file is None else task
            for task in asked
        ]
        asked.append(text)
    return distinct(asked)


def check_lengths(file: Path, artifact: Artifact, lengths: Sequence[int]) -> None:
    """Reject lengths that the artifact serves densely or that the model was not trained for."""
    for length in lengths:
        if length < artifact.prefill.dense_below and any(artifact.prefill.layers):
            raise HeadwiseError(
                f"--length {length} is below the dense_below of {file}, "
                f"{artifact.prefill.dense_below}, so it would be served densely: ask for longer "
                "prompts"
            )
        if length > artifact.model.max_positions:
            raise HeadwiseError(
                f"--length {length} is more than the {artifact.model.max_positions} positions of "
                f"{artifact.model.name}"
            )


def check_seeds(file: Path, artifact: Artifact, config: Evaluation) -> None:
    """Reject seeds of the artifact's search: generated prompts of one seed are the same ones."""
    generated = [task.name for task in config.tasks if not task.has_text]
    if artifact.search is None or not generated:
        return
    searched = artifact.search.seed
    for seed in range(config.seed, config.seed + config.seeds):
        if is_seed_of_search(seed, searched):
            raise HeadwiseError(
                f"--seed {config.seed}: prompts of seed {seed} are those of the search of {file}, "
                f"whose seed was {searched} ({', '.join(generated)}); give another --seed, such as "
                f"{seed + 1000}"
            )


def prompt_sets(config: Evaluation, tokenizer: Any, length: int, seen: Seen) -> list[Set]:
    """Make all prompts of one length; windows of texts are unseen ones as far as there are any."""
    sets = []
    for task in config.tasks:
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
            samples = config.samples * per_context(placed)
            sampled = seeded_prompts(
                placed,
                tokenizer,
                length=length,
                samples=samples,
                seeds=range(config.seed, config.seed + config.seeds),
                seen=seen,
            )
            sets.append(
                Set(
                    task=task.name,
                    length=length,
                    depth=depth,
                    prompts=tuple(sampled.prompts),
                    seeds=sampled.seeds,
                    digests=tuple(map(_digest, sampled.prompts)),
                    samples=samples * config.seeds,
                    overlapping=sampled.overlapping,
                )
            )
    return sets


def open_ledger(folder: Path, loaded: LoadedModel, *, fresh: bool) -> Ledger:
    """Open the resume file of all evaluations in a folder; it stays for later runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise HeadwiseError(
            f"cannot make the folder {shorten(str(folder), 400)}: {reason(error)}"
        ) from None
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
            for each, names in zip(here, _units(here), strict=True):
                for method in built:
                    records = [ledger.get(of(method, length, digest)) for digest in each.digests]
                    rows += _rows(each, method, records, names)
    return Measured(rows, *_shortages(sets))


def _run(
    loaded: LoadedModel,
    methods: Sequence[Method],
    sets: Sequence[Set],
    of: _Units,
    ledger: Ledger,
    shown: Phase,
) -> None:
    """Run each context under each method that lacks it, dense attention first."""
    placed = [
        (each, prompt, digest)
        for each in sets
        for prompt, digest in zip(each.prompts, each.digests, strict=True)
    ]
    for numbers in by_context([prompt for _, prompt, _ in placed]):
        first = placed[numbers[0]][0]
        length = first.length
        # By digest: equal prompts of several depths are run once.
        prompts = {placed[number][2]: placed[number][1] for number in numbers}
        tokens = length * len(numbers)
        expected: Tensor | None = None
        for method in methods:
            units = {digest: of(method, length, digest) for digest in prompts}
            missing = [digest for digest, unit in units.items() if unit not in ledger]
            left = [prompts[digest] for digest in missing]
            if not left:
                shown.skip(tokens)
                continue
            shown.note(f"{method.name} {first.task} {length}")
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
                            what = f"{first.task}, {length} tokens: {name} of {method.name} is"
                            check_finite(value, what, loaded.model)
                    ledger.put(units[missing[trial.number]], record)
            shown.update(tokens)


def _rows(
    prompt_set: Set, method: Method, records: Sequence[Mapping[str, Any]], units: Sequence[str]
) -> Iterator[Row]:
    """Rows of a method's records on a set, prompt by prompt, each with the name of its unit."""
    for at, (prompt, record) in enumerate(zip(prompt_set.prompts, records, strict=True)):
        yield from rows_of(
            record,
            task=prompt_set.task,
            length=prompt_set.length,
            method=method.name,
            prompt=f"{prompt_set.depth}/{at}",
            unit=units[at],
            seed=prompt_set.seeds[at],
            questions=len(prompt.scored) or 1,
            depth=prompt_set.depth,
        )


def _units(sets: Sequence[Set]) -> list[list[str]]:
    """Name the unit of each prompt of each set, all of one length; methods have the same ones."""
    prompts = [prompt for each in sets for prompt in each.prompts]
    names = [""] * len(prompts)
    for number, unit in enumerate(units(prompts)):
        for at in unit:
            names[at] = str(number)
    rest = iter(names)
    return [list(islice(rest, len(each.prompts))) for each in sets]


def _shortages(sets: Sequence[Set]) -> tuple[list[Overlap], list[Fewer]]:
    """Count the prompts of each task and length that the search had seen, and that are missing."""
    places: dict[tuple[str, int], list[Set]] = {}
    for each in sets:
        places.setdefault((each.task, each.length), []).append(each)
    seen: list[Overlap] = []
    fewer: list[Fewer] = []
    for (task, length), here in places.items():
        prompts = sum(len(each.prompts) for each in here)
        samples = sum(each.samples for each in here)
        if overlapping := sum(each.overlapping for each in here):
            seen.append(Overlap(task, length, overlapping, prompts))
        if prompts < samples:
            fewer.append(Fewer(task, length, prompts, samples))
    return seen, fewer


def _digest(prompt: Prompt) -> str:
    """Hash all of a prompt that an answer depends on."""
    others = dict.fromkeys(("evidence", "text_spans", "cell", "task"))
    return hashlib.sha256(canonical_json({**asdict(prompt), **others})).hexdigest()[:16]


class _Units:
    """A prompt under a method as a unit of the ledger: by all that its record depends on."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __call__(self, method: Method, length: int, digest: str) -> Unit:
        return self._ledger.unit(
            f"trial/{VERSION}/{method.name}.{method.identity}/{length}/{digest}"
        )
