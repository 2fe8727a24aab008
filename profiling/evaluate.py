"""python -m profiling.evaluate: quality and speed of an artifact beside dense attention and other methods, as one page.

Every prompt under every method is a file of a ledger in the report's folder: a killed run goes on where it was, and
methods, tasks, lengths and samples can be added later without running again what is there.

python -m profiling.evaluate cfg.yaml --model smollm2 --length 4096 8192 --text book.txt --out report/
python -m profiling.evaluate cfg.yaml --model smollm2 --quick --out report/
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import Artifact, HeadwiseError, Measurement, arguments, load_pair, update
from artifacts.command_line import ArgumentParser, run_command
from artifacts.files import check_writable
from profiling.evaluation.kvpress import write_results
from profiling.evaluation.measure import (
    DEPTHS,
    Evaluation,
    check_lengths,
    evaluate,
    open_ledger,
    tasks_of,
)
from profiling.evaluation.method_table import method_names
from profiling.evaluation.methods import Methods, beside_of
from profiling.evaluation.page import write_report
from profiling.evaluation.record import attached, record_of, table
from profiling.evaluation.times import Speed, measure
from profiling.models.loading import load_model
from profiling.prompts.prompt import DEFAULT_TASKS, TASKS
from profiling.prompts.settings import TEXT, settings, usual_length
from runtime.fingerprint import check

DEFAULT_METHODS = (
    "dense",
    "headwise",
    "headwise-tail",
    "headwise_static",
    "vertical_slash",
    "vertical_slash-tail",
    "a_shape",
    "a_shape-tail",
    "dilated",
    "strided",
)
_QUICK_METHODS = ("dense", "headwise", "headwise_static", "a_shape")
_QUICK_LENGTH, _QUICK_SAMPLES = 2048, 2
_QUICK_TASKS = ("line_turns@questions=4", *DEFAULT_TASKS[1:])


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the command; `speed` None leaves speed out."""

    model: str
    config: Path
    out: Path
    quality: Evaluation
    beside: tuple[Path, ...] = ()
    speed: Speed | None
    dtype: str = "bfloat16"
    device: str = "cpu"
    revision: str | None = None
    sparse_always: bool = False
    fresh: bool = False
    again: bool = False
    attach: bool = False
    set_dense_below: bool = False
    kvpress: Path | None = None
    command: str = ""


def run(job: Job) -> dict[str, Any]:
    """Evaluate; write evaluation.json and index.html into the folder, and what else was asked for.

    Returns:
        What evaluation.json holds.

    Raises:
        HeadwiseError: anything that the user has to put right.
    """
    artifact, arrays = load_pair(job.config)
    if not job.sparse_always:
        check_lengths(artifact, job.quality.lengths)
    if job.set_dense_below and (job.speed is None or not job.speed.crossover):
        raise HeadwiseError("--set-dense-below needs the crossover: leave --no-speed and --no-crossover away")
    if job.attach or job.set_dense_below:
        check_writable(job.config)
    beside = beside_of(job.beside, artifact)
    for name in job.quality.methods:
        if name not in (known := method_names(artifact, beside)):
            raise HeadwiseError(f"unknown method {name!r}; known for this artifact: {', '.join(known)}")
    loaded = load_model(job.model, dtype=job.dtype, device=job.device, revision=job.revision)
    for each in (artifact, *(other.artifact for other in beside.values())):
        check(each.model, loaded.model)
    with open_ledger(job.out, fresh=job.fresh) as ledger:
        quality = job.quality
        methods = Methods(
            loaded, artifact, arrays, share=quality.share, density=quality.density, beside=beside, ledger=ledger
        )
        outcomes = evaluate(job.quality, loaded, methods, ledger)
        times = None
        if job.speed is not None:
            times = measure(job.speed, loaded, methods, ledger, spec=job.model, revision=job.revision, again=job.again)
    record = record_of(artifact, methods, job.quality, outcomes, times, loaded=loaded, command=job.command)
    write_report(job.out, record)
    if job.kvpress is not None and not write_results(
        job.kvpress, record, outcomes, loaded.tokenizer, model=artifact.model.name
    ):
        print(f"{job.kvpress} stays as it is: no task has answers that follow its prompts", file=sys.stderr)
    if job.attach or job.set_dense_below:
        _write_into(job, record)
    return record


def _write_into(job: Job, record: dict[str, Any]) -> None:
    """The evidence, and dense_below where the crossover was found."""
    entries = tuple(Measurement(**entry) for entry in attached(record)) if job.attach else ()
    found = record["crossover"] and record["crossover"]["length"]
    if job.set_dense_below and found is None:
        print("dense_below stays as it is: no length was found from which Headwise is faster", file=sys.stderr)

    def change(artifact: Artifact, arrays: dict[str, Any]) -> tuple[Artifact, dict[str, Any]]:
        fields: dict[str, Any] = {}
        if entries:
            fields["evidence"] = artifact.evidence.with_measurements(entries, command=job.command)
        if job.set_dense_below and found is not None:
            fields["prefill"] = artifact.prefill.model_copy(update={"dense_below": found})
        return artifact.model_copy(update=fields), arrays

    update(job.config, change)


def parser() -> ArgumentParser:
    """The command line of python -m profiling.evaluate."""
    p = ArgumentParser(prog="python -m profiling.evaluate", description=__doc__)
    arguments.add_model(p)
    arguments.add_artifact(p, old="--config")
    arguments.add_beside(p)
    arguments.add_out(p, "folder of the report: index.html, evaluation.json, the ledger", metavar="FOLDER")
    arguments.add_task(p, f"`all` (that need no file), or one of: {TASKS}", old="--tasks")
    p.add_argument("--text", help="long text: adds perplexity by position, and is the haystack of the needle")
    arguments.add_length(p, "prompt lengths (default: the model's positions)", several=True, old="--lengths")
    p.add_argument("--methods", nargs="+", help=f"`all`, or some of them (default: {' '.join(DEFAULT_METHODS)})")
    p.add_argument(
        "--samples",
        type=int,
        help="prompts, or contexts, of each task, length, seed and depth of the needle (default 12)",
    )
    p.add_argument("--depths", nargs="+", type=float, help="where the needle lies (default: 0 0.25 0.5 0.75 1)")
    p.add_argument(
        "--fidelity", action="store_true", help="also how near each is to dense attention: answers, KL, recall"
    )
    p.add_argument("--share", type=float, default=Evaluation.share, help="tokens that caches keep (default 0.2)")
    p.add_argument("--density", type=float, help="of single kinds and oracles (default: the artifact's own)")
    arguments.add_seed(p, Evaluation.seed)
    p.add_argument("--seeds", type=int, default=Evaluation.seeds, help="so many, from --seed on (default 1)")
    p.add_argument("--quick", action="store_true", help="few prompts, methods and rounds: a first look")
    p.add_argument("--repeats", type=int, help="timed rounds, all in turn (default 5)")
    p.add_argument("--steps", type=int, default=Speed.steps, help="decoded tokens of a timed round")
    p.add_argument("--no-speed", dest="speed", action="store_false", help="quality only")
    p.add_argument("--no-memory", dest="memory", action="store_false", help="no peak memory")
    p.add_argument("--no-crossover", dest="crossover", action="store_false", help="do not look for the crossover")
    p.add_argument(
        "--time-again", dest="again", action="store_true", help="measure speed anew, whatever the ledger has"
    )
    p.add_argument("--sparse-always", action="store_true", help="use the patterns below the artifact's dense_below too")
    p.add_argument("--attach", action="store_true", help="write the summary into the artifact's evidence")
    p.add_argument("--set-dense-below", action="store_true", help="write the crossover into the artifact")
    p.add_argument("--kvpress", type=Path, metavar="FOLDER", help="also write the answers in kvpress's result folders")
    p.add_argument("--fresh", action="store_true", help="discard the ledger")
    arguments.add_dtype(p)
    arguments.add_device(p)
    arguments.add_revision(p)
    return p


def _asked(options: argparse.Namespace, artifact: Artifact) -> tuple[list[str], list[int]]:
    """Tasks and lengths: those asked for, or else the model's settings at the length that most have, or else the usual.

    Settings at a length that the artifact serves densely leave the length as it is for a model without any.
    """
    least, longest = artifact.prefill.dense_below, artifact.model.max_positions
    usual = min(max(_QUICK_LENGTH, least), longest) if options.quick else longest
    lengths = options.length or [usual]
    rows = [each for each in settings(artifact.model.name) if each.asked]
    if options.tasks or not rows:
        return list(options.tasks or (_QUICK_TASKS if options.quick else DEFAULT_TASKS)), lengths
    if not options.length and (known := usual_length(rows)) >= least:
        rows, lengths = [each for each in rows if each.length == known], [known]
    return [*(each.task for each in rows), TEXT], lengths


def job_from(options: argparse.Namespace, command: str) -> Job:
    """What a command line asks for.

    Raises:
        HeadwiseError: a value that cannot be.
    """
    artifact, _ = load_pair(options.config)
    quick = options.quick
    tasks, lengths = _asked(options, artifact)
    names = options.methods or (_QUICK_METHODS if quick else DEFAULT_METHODS)
    beside = tuple(beside_of(options.beside, artifact))
    known = method_names(artifact, beside)
    chosen = known if "all" in names else [name for name in names if options.methods or name in known] + list(beside)
    if options.text:
        tasks = [f"{task}:{options.text}" if task == "needle" else task for task in tasks] + [f"text:{options.text}"]
    quality = Evaluation(
        tasks=tasks_of(tasks),
        lengths=tuple(sorted(set(lengths))),
        methods=tuple(dict.fromkeys(("dense", *chosen))),
        samples=options.samples if options.samples is not None else _QUICK_SAMPLES if quick else Evaluation.samples,
        depths=tuple(options.depths or ((0.0, 0.5, 1.0) if quick else DEPTHS)),
        share=options.share,
        density=options.density,
        seed=options.seed,
        seeds=options.seeds,
        fidelity=options.fidelity,
    )
    speed = Speed(
        lengths=quality.lengths,
        methods=quality.methods,
        repeats=options.repeats if options.repeats is not None else 2 if quick else Speed.repeats,
        steps=options.steps,
        memory=options.memory and not quick,
        crossover=options.crossover and "headwise" in quality.methods and (not quick or options.set_dense_below),
    )
    same = ("dtype", "device", "revision", "sparse_always", "fresh", "again", "attach", "set_dense_below", "kvpress")
    return Job(
        model=options.model,
        config=options.config,
        out=options.out,
        quality=quality,
        beside=tuple(options.beside),
        speed=speed if options.speed else None,
        command=command,
        **{name: getattr(options, name) for name in same},
    )


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    record = run(job_from(options, arguments.as_typed("profiling.evaluate", argv)))
    print(table(record))
    print(f"\nwrote {options.out / 'index.html'} and {options.out / 'evaluation.json'}")
    return 0


if __name__ == "__main__":
    run_command(main)
