"""python -m profiling.difficulty: how well a model does on tasks densely, and how many prompts tell a loss of 5 points.

A task shows differences where dense attention is right in 40% to 90% of its prompts, and more often than guessing.
Beside it stands what a cache of sinks and the last half of the prompt makes of the same prompts; the spread of the
difference says how many are needed. Where 8 prompts show that dense attention is outside of that by every measure, or
below chance, no more are run.
Every prompt is a unit of a ledger beside the output: a killed run goes on where it was.

python -m profiling.difficulty --model smollm2 --task babilong_qa1 --length 1024 2048 --out difficulty.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, Streaming, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import atomic_write
from profiling.environment import environment
from profiling.evaluation.record import as_json
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import bar
from profiling.prompts.prompt import digest, make_prompts, parse_task, per_context
from profiling.prompts.settings import HIGH, LOW, Setting, keep
from profiling.quality.guessing import MEASURES, Measure, guessed
from profiling.quality.intervals import mean_interval, paired_difference, prompts_needed
from profiling.quality.method import Method, of_policy
from profiling.quality.trials import VERSION, trials
from profiling.speed.baselines import KERNEL
from runtime.fingerprint import fingerprint

_SINKS, _HALF = 4, "half"
# Prompts after which a task may be given up.
_LEAST = 8


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """One run of the command. samples: prompts of each task and length, or contexts with all their questions."""

    model: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    out: Path
    samples: int = 20
    seed: int = 3000
    dtype: str = "bfloat16"
    device: str = "cpu"
    fresh: bool = False
    settings: Path | None = None
    command: str = ""


def run(config: Difficulty) -> dict[str, Any]:
    """Measure and write the figures as JSON.

    Returns:
        What the file holds.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    for task in config.tasks:
        parse_task(task)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    weights = fingerprint(loaded.model, name=loaded.name, revision=loaded.revision).weights_sha256
    settings = {"difficulty": VERSION, "weights": weights, "dtype": config.dtype, "device": config.device}
    rows: list[Setting] = []
    with Ledger(config.out, "difficulty", settings=settings, fresh=config.fresh) as ledger:
        for length in config.lengths:
            for task in config.tasks:
                rows += _of_task(config, loaded, ledger, task, length)
                record = _record(config, settings, loaded, rows)
                atomic_write(config.out, as_json(record))
    if config.settings is not None:
        keep(config.settings, loaded.name, rows)
    return record


def _of_task(config: Difficulty, loaded: LoadedModel, ledger: Ledger, task: str, length: int) -> list[Setting]:
    count = per_context(task)
    prompts = make_prompts(
        task, loaded.tokenizer, length=length, samples=config.samples * count, seed=config.seed, shorter=True
    )
    groups = [prompts[at : at + count] for at in range(0, len(prompts), count)]
    window = Streaming(sinks=_SINKS, window=max(1, length // 2 - _SINKS))
    chance: dict[Measure, float] = {
        measure: statistics.mean(guessed(prompt, measure) for prompt in prompts) for measure in MEASURES
    }
    found: dict[str, list[dict[str, Any]]] = {KERNEL: [], _HALF: []}
    for name in found:
        method = of_policy(loaded, name, None if name == KERNEL else window)
        with method.apply(loaded.model):
            for some in bar(groups, desc=f"{name} {task} {length}"):
                if not _given_up(found[KERNEL], chance):
                    unit = ledger.unit(f"{name}/{task}/{length}/{digest(some)}")
                    found[name].append(ledger.once(unit, partial(_records, loaded, some, method)))
    return [row for measure in MEASURES for row in _row(task, length, measure, chance[measure], found)]


def _given_up(records: Sequence[dict[str, Any]], chance: Mapping[Measure, float]) -> bool:
    """Whether dense attention is outside of 40% to 90%, or below chance, by every measure, beyond its interval."""
    values = {measure: [record[measure] for record in records] for measure in MEASURES}
    known = {measure: mean_interval(some) for measure, some in values.items() if some and None not in some}
    return len(records) >= _LEAST and all(
        own.high < max(LOW, chance[measure]) or own.low > HIGH for measure, own in known.items()
    )


def _records(loaded: LoadedModel, prompts: Sequence[Any], method: Method) -> dict[str, Any]:
    """Means over prompts that share a context; None where one has none."""
    start = time.process_time()
    some = [record for _, record in trials(loaded.model, loaded.tokenizer, prompts, method)]
    seconds = time.process_time() - start
    found: dict[str, Any] = {"seconds": seconds}
    for measure in MEASURES:
        values = [record.get(measure) for record in some]
        found[measure] = None if None in values else sum(filter(None, values)) / len(values)
    return found


def _row(
    task: str, length: int, measure: Measure, chance: float, found: dict[str, list[dict[str, Any]]]
) -> list[Setting]:
    dense, half = ([record[measure] for record in found[name]] for name in (KERNEL, _HALF))
    if None in dense:
        return []
    own = mean_interval(dense)
    row = Setting(
        task=parse_task(task).name,
        length=length,
        measure=measure,
        count=len(dense),
        dense=own.value,
        low=own.low,
        high=own.high,
        seconds=statistics.mean(record["seconds"] for record in found[KERNEL]),
        chance=chance,
    )
    if not half:
        return [row]
    gap, apart = paired_difference(half, dense), [a - b for a, b in zip(half, dense, strict=True)]
    return [
        replace(
            row,
            difference=gap.value,
            difference_low=gap.low,
            difference_high=gap.high,
            prompts=prompts_needed(apart),
            telling=prompts_needed(apart, -gap.value) if gap.value < 0 else None,
        )
    ]


def _record(
    config: Difficulty, settings: dict[str, Any], loaded: LoadedModel, rows: Sequence[Setting]
) -> dict[str, Any]:
    return {
        "command": config.command,
        "model": loaded.name,
        "settings": {**settings, "samples": config.samples, "seed": config.seed},
        "environment": environment(loaded.model.device),
        "rows": [{**asdict(row), "shows": row.shows} for row in rows],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text; * where dense attention is between 40% and 90%, and above chance."""
    head = f"{'dense':>6}  {'chance':>6}  {'half a window':>24}  {'prompts for 5 points':>20}  {'for half':>8}"
    lines = [f"{'':<32}{'tokens':>7}  {'measure':<8}{head}"]
    for row in rows:
        gap = "given up"
        if row["difference"] is not None:
            gap = f"{row['difference']:+.2f} ({row['difference_low']:+.2f} to {row['difference_high']:+.2f})"
        mark = "*" if row["shows"] else " "
        lines.append(
            f"{row['task']:<32}{row['length']:>7}  {row['measure']:<8}"
            f"{row['dense']:>6.2f}{mark} {row['chance']:>6.2f}  {gap:>24}  "
            f"{row['prompts'] or '-':>20}  {row['telling'] or '-':>8}"
        )
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.difficulty."""
    p = ArgumentParser(prog="python -m profiling.difficulty", description=__doc__)
    arguments.add_model(p)
    arguments.add_task(p, "what is measured, one or more")
    arguments.add_length(p, "prompt lengths (default 1024)", several=True, default=[1024])
    arguments.add_out(p, "JSON file; its ledger is kept beside it")
    p.add_argument("--samples", type=int, default=Difficulty.samples, help="prompts, or contexts, of each (default 20)")
    p.add_argument("--settings", type=Path, metavar="FILE", help="also keep each task's best setting in this file")
    arguments.add_seed(p, Difficulty.seed)
    p.add_argument("--fresh", action="store_true", help="discard what an interrupted run left")
    arguments.add_dtype(p)
    arguments.add_device(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    given = vars(parser().parse_args(argv))
    if given["samples"] < 2:
        raise HeadwiseError(f"--samples must be at least 2, got {given['samples']}")
    tasks, lengths = tuple(given.pop("tasks") or ()), tuple(given.pop("length"))
    if not tasks:
        raise HeadwiseError("say what to measure: --task TASK, one or more")
    command = arguments.as_typed("profiling.difficulty", argv)
    record = run(Difficulty(**given, tasks=tasks, lengths=lengths, command=command))
    print(f"{table(record['rows'])}\n\nwrote {given['out']}")
    return 0


if __name__ == "__main__":
    run_command(main)
