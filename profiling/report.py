"""python -m profiling.report: the standing page of a model's methods, as much of it as fits the time given.

Speeds first, then single kinds in the artifact's time, then tasks: of each as many prompts as can be told apart at all
under the most telling methods, then under the others, then twice and four times as many, of several seeds each.
Tasks, their lengths and their order are those measured for the model (profiling/prompts/settings.json), the most
telling for its time first. What does not fit the minutes is left out and named; the same command goes on where it
stopped. The folder is like that of profiling.evaluate.

python -m profiling.report cfg.yaml --model smollm2 --minutes 30 --out report/
python -m profiling.report report/                     # draws its page again, from what was measured
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from artifacts import Artifact, HeadwiseError, arguments, load_pair
from artifacts.command_line import ArgumentParser, run_command
from artifacts.errors import one_line, reason, shorten
from artifacts.files import atomic_write, open_regular
from profiling.evaluation.equal_time import equal_time
from profiling.evaluation.measure import OUTPUT, Evaluation, Outcome, check_lengths, evaluate, open_ledger
from profiling.evaluation.method_table import method_names
from profiling.evaluation.methods import Methods, beside_of
from profiling.evaluation.page import page, write_report
from profiling.evaluation.record import record_of, renewed, table
from profiling.evaluation.times import Speed, measure
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import parse_task
from profiling.prompts.settings import TEXT, settings, usual_length
from profiling.quality.intervals import least_units
from profiling.speed.ratios import LEAST
from runtime.fingerprint import check

# Whose order of tasks is taken for a model that none was measured for.
_MEASURED = "smollm2"
# The most telling first: between these two limits lies what a method can be.
METHODS = ("dense", "headwise", "a_shape", "vertical_slash", "random_tiles", "oracle_tiles")
# Then what others do, and what the tail and keys in place of tiles are worth.
FURTHER = ("skip_softmax", "top_p_tiles", "headwise-tail", "oracle", "strided", "dense+random", "dense+omnikv")
# As many times the prompts of the first round.
ROUNDS = (1, 2, 4)
# Measures of a task, at most; each is a look.
_LOOKS = 4


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of the command; minutes: what it may take, the model's loading included.

    tasks, lengths: empty for those of the model's settings.
    """

    config: Path
    model: str
    out: Path
    beside: tuple[Path, ...] = ()
    minutes: float = 30
    lengths: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = (*METHODS, *FURTHER)
    seed: int = Evaluation.seed
    seeds: int = 3
    dtype: str = "bfloat16"
    device: str = "cpu"
    command: str = ""

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise HeadwiseError(f"--minutes must be above 0, got {self.minutes:g}")
        if self.seeds < 1:
            raise HeadwiseError(f"--seeds must be at least 1, got {self.seeds}")
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
    beside = beside_of(config.beside, artifact)
    known = method_names(artifact)
    names = tuple(dict.fromkeys(("dense", *(name for name in config.methods if name in known), *beside)))
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    for each in (artifact, *(other.artifact for other in beside.values())):
        check(each.model, loaded.model)
    places, left = places_of(loaded.name, artifact, config.tasks, config.lengths)
    lengths = tuple(sorted({length for _, length in places}))
    with open_ledger(config.out, fresh=False) as ledger:
        methods = Methods(loaded, artifact, arrays, beside=beside, ledger=ledger)
        speed = Speed(lengths=lengths, methods=names, repeats=LEAST, memory=False, crossover=False)
        times = measure(speed, loaded, methods, ledger, spec=config.model, revision=None, again=False)
        compared = []
        if "headwise" in names:
            seeds = range(config.seed, config.seed + config.seeds)
            compared = [equal_time(loaded, methods, names, ledger, length=lengths[-1], seeds=seeds)]
        run = _Run(config, loaded, methods, names, ledger, end)
        left += run.rounds(places)
    asked = Evaluation(
        tasks=tuple(dict.fromkeys(step.task for step in run.found)),
        lengths=lengths,
        methods=names,
        samples=max(run.prompts.values()),
        seed=config.seed,
        seeds=config.seeds,
    )
    found = [outcome for outcomes in run.found.values() for outcome in outcomes]
    record = record_of(
        artifact, methods, asked, found, times, loaded=loaded, command=config.command, same_time=compared
    )
    record["left_out"] = {"minutes": config.minutes, "what": left}
    write_report(config.out, record)
    return record


def places_of(
    model: str, artifact: Artifact, tasks: Sequence[str], lengths: Sequence[int]
) -> tuple[list[tuple[str, int]], list[str]]:
    """Tasks with their lengths, the most telling first, and what is left out because it would be served densely.

    Raises:
        HeadwiseError: a length that was asked for, or every one, is shorter than the artifact serves sparsely.
    """
    known = [each for each in settings(model) if each.asked]
    if not tasks and not lengths and known:
        found = [(TEXT, usual_length(known)), *((each.task, each.length) for each in known)]
        kept = [place for place in found if place[1] >= artifact.prefill.dense_below]
        if kept:
            what = [f"{task} at {length} tokens, which the artifact serves densely" for task, length in found]
            return kept, [told for told, place in zip(what, found, strict=True) if place not in kept]
    lengths = lengths or [artifact.model.max_positions]
    check_lengths(artifact, lengths)
    tasks = tasks or [TEXT, *(each.task for each in known or settings(_MEASURED))]
    return [(task, length) for task in tasks for length in lengths], []


class _Step(NamedTuple):
    """A task at a length under some methods; further: these are not the most telling ones."""

    task: str
    length: int
    further: bool


class _Run:
    """The rounds of a report: of each task, length and half of the methods as many prompts as fit the time."""

    def __init__(
        self,
        config: Report,
        loaded: LoadedModel,
        methods: Methods,
        names: tuple[str, ...],
        ledger: Ledger,
        end: float,
    ) -> None:
        self._config, self._loaded, self._methods, self._names = config, loaded, methods, names
        self._ledger, self._end = ledger, end
        self.found: dict[_Step, list[Outcome]] = {}
        # Of each seed.
        self.prompts: dict[_Step, int] = {}
        self._seconds: dict[_Step, float] = {}

    def rounds(self, places: Sequence[tuple[str, int]]) -> list[str]:
        """Run what fits; what did not."""
        further = tuple(name for name in self._names if name in FURTHER)
        steps = [_Step(*place, of) for of in (False, True) for place in places if further or not of]
        looks = _LOOKS * (len(self._names) - 1) * (len(places) + len({length for _, length in places}))
        first = -(-least_units(looks) // self._config.seeds)
        left = []
        for samples in (times * first for times in ROUNDS):
            for step in steps:
                # One that was never run is taken for the slowest of those that were.
                each = self._seconds.get(step, max(self._seconds.values(), default=0.0))
                if self.found and time.monotonic() + each * (samples - self.prompts.get(step, 0)) > self._end:
                    of = f" under {', '.join(further)}" if step.further else ""
                    left.append(f"{step.task} at {step.length} tokens, {samples * self._config.seeds} prompts{of}")
                else:
                    self._run(step, samples)
        return left

    def _run(self, step: _Step, samples: int) -> None:
        start = time.monotonic()
        asked = Evaluation(
            tasks=(step.task,),
            lengths=(step.length,),
            methods=tuple(name for name in self._names if (name in FURTHER) == step.further),
            samples=samples,
            seed=self._config.seed,
            seeds=self._config.seeds,
        )
        self.found[step] = evaluate(asked, self._loaded, self._methods, self._ledger)
        self._seconds[step] = (time.monotonic() - start) / (samples - self.prompts.get(step, 0))
        self.prompts[step] = samples


def again(folder: Path) -> dict[str, Any]:
    """Draw the page again; what evaluation.json holds.

    Raises:
        HeadwiseError: there is no such file, it is of no evaluation, or the page cannot be written.
    """
    file = folder / OUTPUT
    try:
        with open_regular(file) as opened:
            record = json.load(opened)
        record = renewed(record)
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
    arguments.add_beside(p)
    arguments.add_model(p, required=False)
    p.add_argument("--out", metavar="FOLDER", type=Path, help="folder of the report")
    p.add_argument("--minutes", type=float, default=Report.minutes, help="what it may take (default 30)")
    arguments.add_length(p, "prompt lengths (default: the model's settings, or else its positions)", several=True)
    arguments.add_task(p, "what is asked, the most telling first (default: the model's settings, or SmolLM2's)")
    p.add_argument("--methods", nargs="+", help=f"(default: {' '.join(Report.methods)})")
    arguments.add_seed(p, Report.seed)
    p.add_argument("--seeds", type=int, default=Report.seeds, help="seeds of prompts, from --seed on (default 3)")
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
        asked: dict[str, Any] = {
            "lengths": tuple(sorted(set(given.pop("length") or ()))),
            "tasks": tuple(given.pop("tasks") or ()),
            "methods": tuple(given.pop("methods") or Report.methods),
            "beside": tuple(given.pop("beside")),
        }
        command = arguments.as_typed("profiling.report", argv)
        record = run(Report(config=config, out=out, command=command, **asked, **given))
    arguments.deliver(f"{table(record)}\n\nwrote {out / 'index.html'}", record, to_json)
    return 0


if __name__ == "__main__":
    run_command(main)
