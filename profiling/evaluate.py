"""headwise evaluate: quality and speed of artifacts beside dense attention and other methods, as
one page.

The first artifact is the row `headwise`, each further one a row by the name of its file. Every
prompt under every method is a file of a ledger in the report's folder: a killed run goes on where
it was, and methods, tasks, lengths and samples can be added later without running again what is
there.

With --minutes the methods are timed, then tasks are asked, the most telling first: of each as many
prompts as any mark takes, then twice and four times as many. What does not fit is left out and
named.

headwise evaluate cfg.yaml --model smollm2 --length 4096 8192 --text book.txt --out report/
headwise evaluate cfg.yaml other.yaml --model smollm2 --quick --out report/
headwise evaluate cfg.yaml --model smollm2 --minutes 30 --out report/
headwise evaluate cfg.yaml --model smollm2 --length 8192 --speed-only --out report/
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from artifacts import Artifact, HeadwiseError, Measurement, load_pair, update
from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import (
    POSITIVE,
    SHARE,
    Range,
    add_arguments,
    arg,
    at_least,
    check_ranges,
    config_of,
    option,
    shared,
)
from artifacts.files import check_writable
from profiling.evaluation.measure import (
    DEPTHS,
    GRID,
    Evaluation,
    check_lengths,
    evaluate,
    open_ledger,
    tasks_of,
)
from profiling.evaluation.method_table import method_names
from profiling.evaluation.methods import Methods, beside_of
from profiling.evaluation.page import write_report
from profiling.evaluation.record import attached, record_of
from profiling.evaluation.rounds import FIRST, FURTHER, Rounds, places_of
from profiling.evaluation.summary import table
from profiling.evaluation.times import Speed, Times, measure
from profiling.ledger import Ledger
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import DEFAULT_TASKS
from profiling.prompts.settings import TEXT, settings, usual_length
from profiling.speed.ratios import LEAST
from runtime.fingerprint import check

DEFAULT_METHODS = (
    "dense",
    "headwise",
    "headwise-tail",
    "vertical_slash",
    "vertical_slash-tail",
    "a_shape",
    "a_shape-tail",
    "dilated",
    "strided",
)
_QUICK_METHODS = ("dense", "headwise", "vertical_slash", "a_shape")
_QUICK_LENGTH = 2048
_QUICK_SAMPLES = 2
_QUICK_REPEATS = 2
_QUICK_DEPTHS = (0.0, 0.5, 1.0)
_QUICK_TASKS = ("line_turns@questions=4", *DEFAULT_TASKS[1:])
# Of a model's settings the most telling, and a text beside them: as many contexts as of
# _QUICK_TASKS.
_QUICK_SETTINGS = 3
_SPEED_METHODS = ("dense", "headwise")
_LIMITED_SEEDS = 3
_DEPTHS: Range = (lambda depths: all(0 <= depth <= 1 for depth in depths), "from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run of the command; None takes the default that depends on the rest."""

    configs: tuple[Path, ...] = shared(
        arguments.add_artifact,
        "artifacts of one model, such as cfg.yaml",
        dest="configs",
        nargs="+",
    )
    model: str = shared(arguments.add_model)
    out: Path = shared(
        arguments.add_out,
        "folder of the report: index.html, evaluation.json, the ledger",
        metavar="FOLDER",
    )
    minutes: float | None = option(
        "ask as many prompts as fit, in place of --samples", default=None, within=POSITIVE
    )
    tasks: tuple[str, ...] | None = shared(
        arguments.add_task,
        f"what is asked, `all` for all that need no file (default {' '.join(DEFAULT_TASKS)})",
        default=None,
    )
    text: str | None = option(
        "long text: adds perplexity by position, and is the haystack of the needle", default=None
    )
    length: tuple[int, ...] | None = shared(
        arguments.add_length,
        "prompt lengths (default: the model's positions)",
        several=True,
        default=None,
    )
    methods: tuple[str, ...] | None = option(
        f"`all`, or some of them (default: {' '.join(DEFAULT_METHODS)})", default=None, nargs="+"
    )
    samples: int | None = option(
        "prompts, or contexts, of each task, length, seed and depth of the needle (default 12)",
        default=None,
        within=at_least(1),
    )
    depths: tuple[float, ...] | None = option(
        "where the needle lies (default: 0 0.25 0.5 0.75 1)",
        default=None,
        nargs="+",
        type=float,
        within=_DEPTHS,
        advanced=True,
    )
    fidelity: bool = option(
        "also agreement with dense attention: answers, tokens, KL, recall",
        default=False,
        action="store_true",
    )
    share: float = option(
        "fraction of tokens that caches keep", default=Evaluation.share, within=SHARE, advanced=True
    )
    density: float | None = option(
        "of single kinds and oracles (default: the artifact's own)",
        default=None,
        within=SHARE,
        advanced=True,
    )
    seed: int = shared(arguments.add_seed, default=Evaluation.seed)
    seeds: int | None = option(
        f"number of seeds, from --seed on (default 1, with --minutes {_LIMITED_SEEDS})",
        default=None,
        within=at_least(1),
        advanced=True,
    )
    quick: bool = option("few prompts, methods and rounds", default=False, action="store_true")
    speed_only: bool = option(
        "seconds to the first token, then of attention alone, and nothing else",
        default=False,
        action="store_true",
    )
    repeats: int | None = option(
        "timed rounds, interleaved (default 5)", default=None, within=at_least(1), advanced=True
    )
    steps: int = option(
        "decoded tokens of a timed round", default=Speed.steps, within=at_least(1), advanced=True
    )
    speed: bool = arg("--no-speed", default=True, action="store_false", help="quality only")
    memory: bool = arg(
        "--no-memory", default=True, action="store_false", help="no peak memory", advanced=True
    )
    crossover: bool = arg(
        "--no-crossover",
        default=True,
        action="store_false",
        help="no search for the crossover",
        advanced=True,
    )
    again: bool = arg(
        "--time-again",
        default=False,
        action="store_true",
        help="time anew, whatever the ledger has",
        advanced=True,
    )
    sparse_always: bool = option(
        "use the patterns below the artifact's dense_below too",
        default=False,
        action="store_true",
        advanced=True,
    )
    attach: bool = option(
        "write the summary into the first artifact's evidence", default=False, action="store_true"
    )
    set_dense_below: bool = option(
        "write the crossover into the first artifact",
        default=False,
        action="store_true",
        advanced=True,
    )
    fresh: bool = option("discard the ledger", default=False, action="store_true")
    dtype: str = shared(arguments.add_dtype, default="auto")
    device: str = shared(arguments.add_device, default="cpu")
    revision: str | None = shared(arguments.add_revision, default=None)
    command: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.minutes is not None and (
            self.quick or self.samples is not None or self.text is not None
        ):
            raise HeadwiseError(
                "--minutes chooses the prompts: leave --quick, --samples and --text away (--task "
                "text:FILE is a text)"
            )
        asked = any(
            each is not None for each in (self.tasks, self.text, self.samples, self.minutes)
        )
        others = asked or self.fidelity or self.set_dense_below or not self.speed
        if self.speed_only and others:
            raise HeadwiseError(
                "--speed-only asks nothing: leave --task, --text, --samples, --minutes, "
                "--fidelity, --no-speed and "
                "--set-dense-below away"
            )
        if self.set_dense_below and (
            not self.speed or not self.crossover or self.minutes is not None
        ):
            raise HeadwiseError(
                "--set-dense-below needs the crossover: leave --no-speed, --no-crossover and "
                "--minutes away"
            )


def run(config: Config) -> dict[str, Any]:
    """Evaluate; write evaluation.json and index.html into the folder, and what else was asked for.

    Returns:
        What evaluation.json holds.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    end = None if config.minutes is None else time.monotonic() + 60 * config.minutes
    first, *others = config.configs
    artifact, arrays = load_pair(first)
    beside = beside_of(others, artifact)
    quality = quality_of(config, artifact, tuple(beside))
    if not config.sparse_always and end is None:
        check_lengths(artifact, quality.lengths)
    if config.attach or config.set_dense_below:
        check_writable(first)
    known = method_names(artifact, beside)
    for name in quality.methods:
        if name not in known:
            raise HeadwiseError(
                f"unknown method {name!r}; known for this artifact: {', '.join(known)}"
            )
    loaded = load_model(
        config.model, dtype=config.dtype, device=config.device, revision=config.revision
    )
    for each in (artifact, *(other.artifact for other in beside.values())):
        check(each.model, loaded.model)
    places: list[tuple[str, int]] = []
    left: list[str] = []
    if end is not None:
        served = artifact
        if config.sparse_always:
            prefill = artifact.prefill.model_copy(update={"dense_below": 0})
            served = artifact.model_copy(update={"prefill": prefill})
        places, left = places_of(loaded.name, served, quality.tasks, quality.lengths)
        quality = replace(quality, lengths=tuple(sorted({length for _, length in places})))
    with open_ledger(config.out, fresh=config.fresh) as ledger:
        methods = Methods(
            loaded,
            artifact,
            arrays,
            share=quality.share,
            density=quality.density,
            beside=beside,
            ledger=ledger,
        )
        if end is None:
            outcomes = evaluate(quality, loaded, methods, ledger)
            times = _timed(config, quality, loaded, methods, ledger)
        else:
            times = _timed(config, quality, loaded, methods, ledger)
            rounds = Rounds(quality, loaded, methods, ledger, end)
            left += rounds.run(places)
            outcomes = rounds.outcomes
            quality = replace(
                quality,
                tasks=tuple(dict.fromkeys(step.task for step in rounds.prompts)),
                samples=max(rounds.prompts.values()),
            )
    record = record_of(
        artifact, methods, quality, outcomes, times, loaded=loaded, command=config.command
    )
    if config.minutes is not None:
        record["left_out"] = {"minutes": config.minutes, "what": left}
    write_report(config.out, record)
    if config.attach or config.set_dense_below:
        _write_into(config, record)
    return record


def quality_of(config: Config, artifact: Artifact, beside: Sequence[str] = ()) -> Evaluation:
    """Tasks, methods and counts of a run; beside: names of the other artifacts.

    With --minutes tasks and lengths are those that were asked for, which may be none.
    """
    quick = config.quick
    limited = config.minutes is not None
    known = method_names(artifact, beside)
    tasks: Sequence[str] = config.tasks or ()
    lengths: Sequence[int] = config.length or ()
    samples = config.samples or (_QUICK_SAMPLES if quick else Evaluation.samples)
    usual: Sequence[str] = _QUICK_METHODS if quick else DEFAULT_METHODS
    if config.speed_only:
        usual = _SPEED_METHODS
        lengths = lengths or [artifact.model.max_positions]
    elif limited:
        usual = (*FIRST, *FURTHER)
    else:
        tasks, lengths = _asked(config, artifact)
    if config.text:
        tasks = [f"{task}:{config.text}" if task == GRID else task for task in tasks]
        tasks.append(f"text:{config.text}")
    methods = config.methods or tuple(name for name in usual if name in known)
    if "all" in methods:
        methods = known
    return Evaluation(
        tasks=tasks_of(tasks),
        lengths=tuple(sorted(set(lengths))),
        methods=tuple(dict.fromkeys(("dense", *methods, *beside))),
        samples=samples,
        depths=config.depths or (_QUICK_DEPTHS if quick else DEPTHS),
        share=config.share,
        density=config.density,
        seed=config.seed,
        seeds=config.seeds or (_LIMITED_SEEDS if limited else Evaluation.seeds),
        fidelity=config.fidelity,
    )


def _asked(config: Config, artifact: Artifact) -> tuple[list[str], list[int]]:
    """Tasks and lengths: those asked for, else the model's settings at their usual length, else the
    defaults.

    Where the artifact serves that length densely, the length is that of a model without settings.
    """
    least = artifact.prefill.dense_below
    longest = artifact.model.max_positions
    usual = min(max(_QUICK_LENGTH, least), longest) if config.quick else longest
    lengths = list(config.length or [usual])
    rows = [each for each in settings(artifact.model.name) if each.asked]
    if config.tasks:
        return list(config.tasks), lengths
    if not rows:
        return list(_QUICK_TASKS if config.quick else DEFAULT_TASKS), lengths
    if not config.length and (known := usual_length(rows)) >= least:
        rows = [each for each in rows if each.length == known]
        lengths = [known]
    if config.quick:
        rows = rows[:_QUICK_SETTINGS]
    return [*(each.task for each in rows), TEXT], lengths


def _timed(
    config: Config, quality: Evaluation, loaded: LoadedModel, methods: Methods, ledger: Ledger
) -> Times | None:
    if not config.speed:
        return None
    short = config.quick or config.speed_only or config.minutes is not None
    usual = Speed.repeats
    if config.speed_only or config.minutes is not None:
        usual = LEAST
    if config.quick:
        usual = _QUICK_REPEATS
    speed = Speed(
        lengths=quality.lengths,
        methods=quality.methods,
        repeats=config.repeats or usual,
        steps=config.steps,
        decode=not config.speed_only,
        memory=config.memory and not short,
        crossover=config.crossover
        and "headwise" in quality.methods
        and (not short or config.set_dense_below),
    )
    return measure(
        speed,
        loaded,
        methods,
        ledger,
        spec=config.model,
        revision=config.revision,
        again=config.again,
    )


def _write_into(config: Config, record: dict[str, Any]) -> None:
    """Write the evidence, and dense_below where the crossover was found, into the first
    artifact."""
    entries = tuple(Measurement(**entry) for entry in attached(record)) if config.attach else ()
    found = record["crossover"] and record["crossover"]["length"]
    if config.set_dense_below and found is None:
        print(
            "dense_below stays as it is: no length was found from which Headwise is faster",
            file=sys.stderr,
        )

    def change(artifact: Artifact, arrays: dict[str, Any]) -> tuple[Artifact, dict[str, Any]]:
        fields: dict[str, Any] = {}
        if entries:
            fields["evidence"] = artifact.evidence.with_measurements(
                entries, command=config.command
            )
        if config.set_dense_below and found is not None:
            fields["prefill"] = artifact.prefill.model_copy(update={"dense_below": found})
        return artifact.model_copy(update=fields), arrays

    update(config.configs[0], change)


def parser() -> ArgumentParser:
    """The command line of headwise evaluate."""
    p = ArgumentParser(prog="headwise evaluate", description=__doc__)
    add_arguments(p, Config)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = vars(parser().parse_args(argv))
    command = arguments.as_typed("evaluate", argv)
    config = config_of(Config, options, command=command)
    record = run(config)
    print(table(record))
    print(f"\nwrote {config.out / 'index.html'} and {config.out / 'evaluation.json'}")
    return 0


if __name__ == "__main__":
    run_command(main)
