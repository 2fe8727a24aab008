"""Runs headwise evaluate: quality and times of all methods, the report, the artifact's evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from artifacts import Artifact, HeadwiseError, load_pair, update
from artifacts.analysis.sections import check_measured
from artifacts.cli.command import one_process
from artifacts.files import check_folder, check_writable
from profiling.evaluation.config import (
    DEFAULT_METHODS,
    DEPTHS,
    Config,
    Evaluation,
    Speed,
)
from profiling.evaluation.measure import (
    check_lengths,
    check_seeds,
    evaluate,
    open_ledger,
    tasks_of,
)
from profiling.evaluation.method_table import (
    ALL_METHODS,
    check_name,
    default_methods,
    method_names,
)
from profiling.evaluation.methods import Methods, beside_of
from profiling.evaluation.record import Record, evidence_of, record_of
from profiling.evaluation.report import Report
from profiling.evaluation.times import Times, measure
from profiling.ledger import Ledger
from profiling.models.device import settled
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.prompt import DEFAULT_TASKS, Task, parse_task
from profiling.speed.baselines import HEADWISE, LEAST, MODEL
from runtime.fingerprint import check, compare

# Tokens of a prompt for an artifact without a search: those of a default search.
_UNSEARCHED_LENGTH = 8192
_QUICK_METHODS = default_methods(tails=False)
_QUICK_LENGTH = 2048
_QUICK_SAMPLES = 2
_QUICK_REPEATS = 2
_QUICK_DEPTHS = (0.0, 0.5, 1.0)
_QUICK_TASKS = (parse_task("line_turns@questions=4"), *DEFAULT_TASKS[1:])
_SPEED_METHODS = (MODEL, HEADWISE)


def run(config: Config, loaded: LoadedModel | None = None) -> Report:
    """Evaluate; write evaluation.json and index.html into the folder, and what else was asked for.

    Args:
        config: of the evaluation.
        loaded: the model; None loads the one that the config names.

    Raises:
        HeadwiseError: any error that the user has to correct.
    """
    one_process("headwise evaluate")
    first, *other_paths = config.configs
    artifact, arrays = load_pair(first)
    other_artifacts = beside_of(other_paths)
    others = {name: other for name, (other, _) in other_artifacts.items()}
    quality = quality_of(config, artifact, others)
    _check(config, [artifact, *others.values()], quality, method_names(artifact, others))
    if loaded is None:
        config = settled(config)
        loaded = load_model(
            config.model, dtype=config.dtype, device=config.device, revision=config.revision
        )
    for each in (artifact, *others.values()):
        check(each.model, loaded.model)
    with open_ledger(config.out, loaded, fresh=config.fresh) as ledger:
        methods = Methods(
            loaded,
            artifact,
            arrays,
            share=quality.share,
            density=quality.density,
            other_artifacts=other_artifacts,
            ledger=ledger,
        )
        measured = evaluate(quality, loaded, methods, ledger)
        times = _timed(config, quality, loaded, methods, ledger)
    record = record_of(
        methods, quality, measured, times, artifact=artifact, loaded=loaded, command=config.command
    )
    report = Report.of(record)
    report.write(config.out)
    if config.attach:
        _attach(config, artifact, record)
    return report


def _check(
    config: Config,
    artifacts: Sequence[Artifact],
    quality: Evaluation,
    allowed: tuple[str, ...],
) -> None:
    """Raise HeadwiseError for requests that an artifact cannot serve, before a model is loaded."""
    for file, artifact in zip(config.configs, artifacts, strict=True):
        check_lengths(file, artifact, quality.lengths)
        check_seeds(file, artifact, quality)
        try:
            compare(artifact.model, artifacts[0].model)
        except HeadwiseError as error:
            raise HeadwiseError(
                f"{file} and {config.configs[0]} do not go together: {error}"
            ) from None
    check_folder(config.out)
    if config.attach:
        check_writable(config.configs[0])
    for name in quality.methods:
        check_name(name, allowed)


def quality_of(
    config: Config, artifact: Artifact, other_artifacts: Mapping[str, Artifact] | None = None
) -> Evaluation:
    """Tasks, methods and counts of a run.

    Args:
        config: of the run.
        artifact: the artifact that is evaluated.
        other_artifacts: the other artifacts by name.
    """
    quick = config.quick
    others = other_artifacts or {}
    names = method_names(artifact, others)
    tasks: Sequence[Task] = config.tasks or ()
    lengths: Sequence[int] = config.length or ()
    if quick:
        usual_samples = _QUICK_SAMPLES
    else:
        usual_samples = Evaluation.samples
    samples = config.samples or usual_samples
    if quick:
        default: Sequence[str] = _QUICK_METHODS
    else:
        default = DEFAULT_METHODS
    if config.speed_only:
        default = _SPEED_METHODS
    else:
        tasks = tasks or (_QUICK_TASKS if quick else DEFAULT_TASKS)
    lengths = lengths or [_usual_length([artifact, *others.values()], quick=quick)]
    asked = config.methods or tuple(name for name in default if name in names)
    # Methods with fields of their own may be named beside all others.
    by_name = {ALL_METHODS: names}
    methods = [name for each in asked for name in by_name.get(each, (each,))]
    usual_depths: tuple[float, ...] = DEPTHS
    if quick:
        usual_depths = _QUICK_DEPTHS
    return Evaluation(
        tasks=tasks_of(tasks, config.text),
        lengths=tuple(sorted(set(lengths))),
        methods=tuple(dict.fromkeys((MODEL, *methods, *others))),
        samples=samples,
        depths=tuple(dict.fromkeys(config.depths or usual_depths)),
        share=config.share,
        density=config.density,
        seed=config.seed,
        seeds=config.seeds,
    )


def _usual_length(artifacts: Sequence[Artifact], *, quick: bool) -> int:
    """The longest length that an artifact was searched at; fewer tokens with `quick`.

    It is within the model's positions, and never a length that an artifact serves densely.
    """
    lengths = [each.prefill.dense_below for each in artifacts]
    if quick:
        lengths.append(_QUICK_LENGTH)
    else:
        lengths += [_searched_length(each) for each in artifacts]
    return min(max(lengths), *(each.model.max_positions for each in artifacts))


def _searched_length(artifact: Artifact) -> int:
    """The length of the search's prompts; _UNSEARCHED_LENGTH if no search is recorded."""
    if artifact.prefill.length is not None:
        return artifact.prefill.length
    if artifact.search is not None:
        return artifact.search.calibration.length
    return _UNSEARCHED_LENGTH


def _timed(
    config: Config, quality: Evaluation, loaded: LoadedModel, methods: Methods, ledger: Ledger
) -> Times:
    if not config.speed:
        return Times()
    short = config.quick or config.speed_only
    default = Speed.repeats
    if config.speed_only:
        default = LEAST
    if config.quick:
        default = _QUICK_REPEATS
    speed = Speed(
        lengths=quality.lengths,
        methods=quality.methods,
        repeats=config.repeats or default,
        steps=config.steps,
        decode=not config.speed_only,
        memory=config.memory and not short,
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


def _attach(config: Config, measured: Artifact, record: Record) -> None:
    """Write the evidence into the first artifact.

    Raises:
        HeadwiseError: the file has another artifact by now.
    """
    entries = evidence_of(record)

    def change(now: Artifact, arrays: dict[str, Any]) -> tuple[Artifact, dict[str, Any]]:
        # An evaluation takes a while, and other commands write into the same file.
        check_measured(now, measured, config.configs[0])
        evidence = now.evidence.with_measurements(entries, command=config.command)
        return now.model_copy(update={"evidence": evidence}), arrays

    update(config.configs[0], change)
