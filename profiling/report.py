"""python -m profiling.report: the standing page of a model's methods, as much of it as fits the time given.

Speeds first, then tasks, the most telling first: 6 prompts of each under every method, then 12, then 24. What does not
fit the minutes is left out and named; the same command goes on where it stopped. The folder is like that of
profiling.evaluate.

python -m profiling.report cfg.yaml --model smollm2 --length 4096 --minutes 30 --out report/
python -m profiling.report report/                     # draws its page again, from what was measured
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, arguments, load_pair
from artifacts.command_line import ArgumentParser, run_command
from artifacts.errors import one_line, reason, shorten
from artifacts.files import atomic_write, open_regular
from profiling.evaluation.measure import OUTPUT, Evaluation, Outcome, check_lengths, evaluate, open_ledger
from profiling.evaluation.method_table import method_names
from profiling.evaluation.methods import Methods
from profiling.evaluation.page import page
from profiling.evaluation.record import as_json, record_of, table
from profiling.evaluation.times import Speed, measure
from profiling.models.loading import load_model
from profiling.prompts.prompt import parse_task
from runtime.fingerprint import check

# The most telling first: what A-shape loses most on, for the time that a prompt takes (docs/results.md).
TASKS = (
    "line_asked",
    "chain",
    "prose",
    "line_turns@questions=16",
    "dictionary",
    "label_map",
    "repeats",
    "babilong_qa1",
    "story_multihop",
    "mrcr",
    "niah_multikey_2",
    "graphwalks_parents",
    "vt",
)
METHODS = ("dense", "headwise", "a_shape", "vertical_slash", "random_tiles", "oracle_tiles", "headwise-tail", "strided")
ROUNDS = (6, 12, 24)


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of the command; minutes: what it may take, the model's loading included."""

    config: Path
    model: str
    out: Path
    minutes: float = 30
    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    methods: tuple[str, ...] = METHODS
    seed: int = Evaluation.seed
    dtype: str = "bfloat16"
    device: str = "cpu"
    command: str = ""

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise HeadwiseError(f"--minutes must be above 0, got {self.minutes:g}")
        for task in self.tasks:
            parse_task(task)


def run(config: Report) -> dict[str, Any]:
    """Measure what fits, and write evaluation.json and index.html into the folder.

    Returns:
        What evaluation.json holds.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    end = time.monotonic() + 60 * config.minutes
    artifact, arrays = load_pair(config.config)
    check_lengths(artifact, config.lengths)
    known = method_names(artifact)
    names = tuple(dict.fromkeys(("dense", *(name for name in config.methods if name in known))))
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    check(artifact.model, loaded.model)
    with open_ledger(config.out, fresh=False) as ledger:
        methods = Methods(loaded, artifact, arrays, ledger=ledger)
        speed = Speed(lengths=config.lengths, methods=names, repeats=3, memory=False, crossover=False)
        times = measure(speed, loaded, methods, ledger, spec=config.model, revision=None, again=False)
        found: dict[tuple[str, int], list[Outcome]] = {}
        prompts: dict[tuple[str, int], int] = {}
        seconds: dict[tuple[str, int], float] = {}
        left: list[str] = []
        for samples in ROUNDS:
            for length in config.lengths:
                for task in config.tasks:
                    place = (task, length)
                    # One that was never run is taken for the slowest of those that were.
                    each = seconds.get(place, max(seconds.values(), default=0.0))
                    if found and time.monotonic() + each * (samples - prompts.get(place, 0)) > end:
                        left.append(f"{task} at {length} tokens, {samples} prompts")
                        continue
                    start = time.monotonic()
                    asked = Evaluation(
                        tasks=(task,), lengths=(length,), methods=names, samples=samples, seed=config.seed
                    )
                    found[place] = evaluate(asked, loaded, methods, ledger)
                    seconds[place] = (time.monotonic() - start) / (samples - prompts.get(place, 0))
                    prompts[place] = samples
    settings = Evaluation(
        tasks=tuple(dict.fromkeys(task for task, _ in found)),
        lengths=config.lengths,
        methods=names,
        samples=max(prompts.values()),
        seed=config.seed,
    )
    record = record_of(
        artifact,
        methods,
        settings,
        [outcome for outcomes in found.values() for outcome in outcomes],
        times,
        command=config.command,
        device=str(loaded.model.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
    )
    record["left_out"] = {"minutes": config.minutes, "what": left}
    atomic_write(config.out / OUTPUT, as_json(record))
    atomic_write(config.out / "index.html", page(record).encode())
    return record


def again(folder: Path) -> dict[str, Any]:
    """Draw the page again; what evaluation.json holds.

    Raises:
        HeadwiseError: there is no such file, it is of no evaluation, or the page cannot be written.
    """
    file = folder / OUTPUT
    try:
        with open_regular(file) as opened:
            record = json.load(opened)
        drawn = page(record)
        table(record)
    except OSError as error:
        raise HeadwiseError(
            f"{shorten(str(file))} cannot be read: {reason(error)}; give a folder that profiling.evaluate wrote"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        what = one_line(f"{type(error).__name__}: {error}")[:100]
        raise HeadwiseError(f"{shorten(str(file))} is of no evaluation by this version ({what})") from None
    atomic_write(folder / "index.html", drawn.encode())
    return dict(record)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.report."""
    p = ArgumentParser(prog="python -m profiling.report", description=__doc__)
    p.add_argument(
        "config", metavar="ARTIFACT", type=Path, help=f"artifact, or a folder with {OUTPUT} whose page to draw again"
    )
    arguments.add_model(p, required=False)
    p.add_argument("--out", metavar="FOLDER", type=Path, help="folder of the report")
    p.add_argument("--minutes", type=float, default=Report.minutes, help="what it may take (default 30)")
    arguments.add_length(p, "prompt lengths (default: the model's positions)", several=True)
    arguments.add_task(p, "what is asked, the most telling first (default: thirteen that need no file)")
    p.add_argument("--methods", nargs="+", help=f"(default: {' '.join(METHODS)})")
    arguments.add_seed(p, Report.seed)
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_json(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    given = vars(parser().parse_args(argv))
    to_json, config, out = given.pop("json"), given.pop("config"), given.pop("out")
    if config.suffix not in (".yaml", ".yml"):
        if given["model"] is not None or out is not None:
            raise HeadwiseError(f"a report of a model needs an artifact, such as cfg.yaml, got {shorten(str(config))}")
        out, record = config, again(config)
    else:
        if given["model"] is None or out is None:
            raise HeadwiseError("a report of an artifact needs --model MODEL and --out FOLDER")
        lengths = given.pop("length") or [load_pair(config)[0].model.max_positions]
        asked: dict[str, Any] = {
            "tasks": tuple(given.pop("tasks") or TASKS),
            "methods": tuple(given.pop("methods") or METHODS),
        }
        command = arguments.as_typed("profiling.report", argv)
        record = run(
            Report(config=config, out=out, lengths=tuple(sorted(set(lengths))), command=command, **asked, **given)
        )
    arguments.deliver(f"{table(record)}\n\nwrote {out / 'index.html'}", record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
