"""python -m profiling.difficulty: how well a model does on tasks densely, and how many prompts tell a loss of 5 points.

A task shows differences where dense attention is right in 40% to 90% of its prompts. Beside it stands what a cache of
sinks and the last half of the prompt makes of the same prompts; the spread of the difference says how many are needed.
Every prompt is a unit of a ledger beside the output: a killed run goes on where it was.

python -m profiling.difficulty --model smollm2 --task babilong_qa1 --length 1024 2048 --out difficulty.json
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, Streaming, arguments
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import atomic_write
from profiling.caches.policies import with_policy
from profiling.evaluation.intervals import mean_interval, paired_difference, prompts_needed
from profiling.evaluation.methods import Method
from profiling.evaluation.record import as_json
from profiling.evaluation.times import machine
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.progress import bar
from profiling.prompts.prompt import digest, make_prompts, parse_task, per_context
from profiling.quality.trials import VERSION, trials
from profiling.speed.baselines import MODEL
from runtime.fingerprint import fingerprint

# Where dense attention has to be for a task to show what a method loses, and what it could win.
LOW, HIGH = 0.4, 0.9
_SINKS = 4


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
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A task at a length by one measure, `score` or `choice`: over `count` prompts, or contexts.

    dense, low, high: of dense attention with its 95% interval. difference and its bounds: of sinks and half a window.
    prompts: how many tell a loss of 5 points in 80% of runs, by the spread of that difference.
    """

    task: str
    length: int
    measure: str
    count: int
    dense: float
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float
    prompts: int

    @property
    def shows(self) -> bool:
        """Whether dense attention is between 40% and 90%."""
        return LOW <= self.dense <= HIGH


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
    rows: list[Row] = []
    with Ledger(config.out, "difficulty", settings=settings, fresh=config.fresh) as ledger:
        for length in config.lengths:
            for task in config.tasks:
                rows += _of_task(config, loaded, ledger, task, length)
                record = _record(config, settings, loaded, rows)
                atomic_write(config.out, as_json(record))
    return record


def _of_task(config: Difficulty, loaded: LoadedModel, ledger: Ledger, task: str, length: int) -> list[Row]:
    count = per_context(task)
    prompts = make_prompts(
        task, loaded.tokenizer, length=length, samples=config.samples * count, seed=config.seed, shorter=True
    )
    window = Streaming(sinks=_SINKS, window=max(1, length // 2 - _SINKS))
    found: dict[str, list[dict[str, Any]]] = {}
    for name, headwise in ((MODEL, None), ("half", with_policy(loaded, window))):
        method = Method(
            name=name,
            make=lambda made=headwise: made,  # type: ignore[misc]
            density=None,
            kept=None,
            identity=name,
            evicts=headwise is not None,
            sizes="",
        )
        applied: AbstractContextManager[object] = nullcontext() if headwise is None else method.apply(loaded.model)
        with applied:
            for at in bar(range(0, len(prompts), count), desc=f"{name} {task} {length}"):
                some = prompts[at : at + count]
                unit = ledger.unit(f"{name}/{task}/{length}/{digest(some)}")
                work = partial(_records, loaded, some, method)
                found.setdefault(name, []).append(ledger.once(unit, work))
    return [row for measure in ("score", "choice") for row in _row(task, length, measure, found)]


def _records(loaded: LoadedModel, prompts: Sequence[Any], method: Method) -> dict[str, Any]:
    """Means over prompts that share a context; None where one has none."""
    some = [record for _, record in trials(loaded.model, loaded.tokenizer, prompts, method)]
    values = {name: [record.get(name) for record in some] for name in ("score", "choice")}
    return {name: None if None in each else sum(filter(None, each)) / len(each) for name, each in values.items()}


def _row(task: str, length: int, measure: str, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    dense, half = ([record[measure] for record in found[name]] for name in (MODEL, "half"))
    if None in dense or None in half:
        return []
    own, gap = mean_interval(dense), paired_difference(half, dense)
    return [
        Row(
            task=parse_task(task).name,
            length=length,
            measure=measure,
            count=len(dense),
            dense=own.value,
            low=own.low,
            high=own.high,
            difference=gap.value,
            difference_low=gap.low,
            difference_high=gap.high,
            prompts=prompts_needed([a - b for a, b in zip(half, dense, strict=True)]),
        )
    ]


def _record(config: Difficulty, settings: dict[str, Any], loaded: LoadedModel, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "command": config.command,
        "model": loaded.name,
        "settings": {**settings, "samples": config.samples, "seed": config.seed},
        "machine": machine(str(loaded.model.device)),
        "versions": {"python": platform.python_version(), "transformers": version("transformers")},
        "rows": [{**asdict(row), "shows": row.shows} for row in rows],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text; * where dense attention is between 40% and 90%."""
    lines = [f"{'':<32}{'tokens':>7}  {'measure':<8}{'dense':>6}  {'half a window':>24}  {'prompts for 5 points':>20}"]
    for row in rows:
        gap = f"{row['difference']:+.2f} ({row['difference_low']:+.2f} to {row['difference_high']:+.2f})"
        mark = "*" if row["shows"] else " "
        lines.append(
            f"{row['task']:<32}{row['length']:>7}  {row['measure']:<8}{row['dense']:>6.2f}{mark} {gap:>24}  "
            f"{row['prompts']:>20}"
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
