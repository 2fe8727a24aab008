"""An evaluation as plain data: its JSON, reading it, and entries of an artifact's evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from artifacts import Artifact
from profiling.environment import environment
from profiling.evaluation.config import Evaluation
from profiling.evaluation.measure import Outcome
from profiling.evaluation.methods import Methods
from profiling.evaluation.rows import (
    ALL,
    BASELINE,
    KL,
    NLL,
    PERPLEXITY,
    SCORE,
    curves,
    figures,
    grid,
)
from profiling.evaluation.speed import Timed
from profiling.evaluation.times import Times
from profiling.models.loading import LoadedModel
from profiling.speed.baselines import EVIDENCE, HEADWISE, KERNEL, MODEL, Speedup, speedup


def record_of(
    artifact: Artifact,
    methods: Methods,
    config: Evaluation,
    outcomes: Sequence[Outcome],
    times: Times | None,
    *,
    loaded: LoadedModel,
    command: str,
) -> dict[str, Any]:
    """Everything that was found and what it was found with."""
    device = str(loaded.model.device)
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return {
        "command": command,
        "model": {"name": artifact.model.name, "weights_sha256": artifact.model.weights_sha256},
        "artifact": {
            "content_sha256": artifact.content_sha256,
            "dense_below": artifact.prefill.dense_below,
            "seeds": methods.seeds,
        },
        "settings": {**asdict(config), "device": device, "dtype": dtype},
        "environment": environment(device),
        "methods": [
            _method(methods, name, length) for length in config.lengths for name in config.methods
        ],
        "figures": [asdict(figure) for figure in figures(outcomes)],
        "curves": [asdict(curve) for curve in curves(outcomes)],
        "grid": [asdict(cell) for cell in grid(outcomes)],
        "seen_by_search": _seen(outcomes),
        **timed_record(times),
    }


def _seen(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Count the prompts of each task and length that the search had seen, where any."""
    # Every method has the same prompts, and every depth its own.
    by_depth = {(each.task, each.length, each.depth): each for each in outcomes}
    seen: dict[tuple[str, int], list[Outcome]] = {}
    for (task, length, _), outcome in by_depth.items():
        seen.setdefault((task, length), []).append(outcome)
    return [
        {
            "task": task,
            "length": length,
            "overlapping": overlapping,
            "samples": sum(len(each.records) for each in own),
        }
        for (task, length), own in seen.items()
        if (overlapping := sum(each.overlapping for each in own))
    ]


def _method(methods: Methods, name: str, length: int) -> dict[str, Any]:
    made = methods.make(name, length)
    description, source = methods.says(name)
    return {
        "name": name,
        "length": length,
        "density": made.density,
        "kept": made.kept,
        "sizes": made.sizes,
        "says": description,
        "source": source,
        "identity": made.identity,
    }


def timed_record(times: Times | None) -> dict[str, Any]:
    """Make the record of times; methods of other rounds by the ratio to one dense figure."""
    if times is None:
        return {"prefill": [], "attention": [], "decode": [], "memory": []}
    prefill = _rounds(times.prefill, lambda timed, slow: {"seconds": timed.median * slow})
    attention = [
        {
            "method": name,
            "length": length,
            "seconds": seconds[name],
            "dense": {dense: seconds[dense] for dense in (MODEL, KERNEL) if dense in seconds},
        }
        for (name, length), seconds in times.attention.items()
        if seconds
    ]
    decode = _rounds(
        times.decode,
        lambda timed, slow: {
            "tokens_per_second": 1 / (timed.median * slow),
            "cache_bytes": timed.cache,
            "steps": timed.steps,
        },
    )
    memory = [
        {"method": name, "length": length, "bytes": held}
        for (name, length), held in times.memory.items()
    ]
    return {
        "prefill": prefill,
        "attention": attention,
        "decode": decode,
        "memory": memory,
    }


def _rounds(
    times: Mapping[tuple[str, int], Timed], fields: Callable[[Timed, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Put methods that were timed in other rounds, on a busier machine, on one scale.

    The scale is that of one dense figure, Headwise's kernel in its last rounds; a method's seconds
    are brought to it by their ratio.

    Args:
        times: of each method at each length.
        fields: makes the fields of a row out of a method's times and the factor to that scale.
    """
    dense = {length: timed.median for (name, length), timed in times.items() if name == KERNEL}
    return [
        {
            "method": name,
            "length": length,
            **fields(timed, dense[length] / timed.speedup.over[KERNEL] / timed.median),
            "speedups": timed.speedup.over,
            "rounds": timed.seconds,
            "dense_rounds": {MODEL: timed.model, KERNEL: timed.kernel},
        }
        for (name, length), timed in times.items()
    ]


def as_json(record: dict[str, Any]) -> bytes:
    """The record as a file's bytes."""
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def number(value: float | None) -> str:
    """A figure with the digits that matter; a dash where there is none."""
    if value is None:
        return "-"
    if abs(value) < 100:
        return f"{value:.3f}"
    return f"{value:,.1f}"


def figure(
    record: dict[str, Any], task: str, length: int, method: str, measure: str
) -> dict[str, Any] | None:
    """One figure of a record; None where there is none."""
    wanted = {"task": task, "length": length, "method": method, "measure": measure}
    return next((each for each in record["figures"] if wanted.items() <= each.items()), None)


def summary_tasks(record: dict[str, Any], length: int) -> list[tuple[str, str]]:
    """List (task, measure) of a summary's columns: all answers first, then each task."""
    here = [each for each in record["figures"] if each["length"] == length]
    tasks = dict.fromkeys(each["task"] for each in here)
    columns = []
    for task in sorted(tasks, key=lambda name: name != ALL):
        measures = {each["measure"] for each in here if each["task"] == task}
        wanted = [SCORE, PERPLEXITY]
        if task == ALL:
            wanted += [NLL, KL]
        if PERPLEXITY in measures:
            wanted.append(KL)
        columns += [(task, measure) for measure in wanted if measure in measures]
    return columns


def methods_at(record: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """List the methods at a length, Headwise's dense kernel after the default where timed."""
    methods = [each for each in record["methods"] if each["length"] == length]
    timed = {each["method"] for each in record["prefill"] if each["length"] == length}
    if KERNEL in timed and all(each["name"] != KERNEL for each in methods):
        methods.insert(1, {"name": KERNEL, "length": length, "density": 1.0, "kept": 1.0})
    return methods


def named(task: str, measure: str) -> str:
    """The name of a column of a summary."""
    if measure == SCORE and task == ALL:
        return task
    return f"{task} {measure}"


def entry(entries: Sequence[dict[str, Any]], name: str, length: int) -> dict[str, Any] | None:
    """The entry of a method at a length; None where there is none."""
    return next(
        (each for each in entries if each["method"] == name and each["length"] == length), None
    )


def attention_of(record: dict[str, Any], name: str, length: int) -> float | None:
    """Seconds of attention alone by a method; of dense attention those of the same rounds."""
    if name not in (MODEL, KERNEL):
        own = entry(record["attention"], name, length)
        if own:
            return own["seconds"]
        return None
    beside = entry(record["attention"], HEADWISE, length)
    if beside:
        return beside["dense"].get(name)
    return None


def speedup_of(timed: dict[str, Any]) -> Speedup:
    """The speed-up of an entry of `prefill` or `decode`."""
    return speedup(timed["rounds"], timed["dense_rounds"])


def attached(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the evidence fields of an artifact: its figures at each length next to dense."""
    common = {
        "command": record["command"],
        "device": record["settings"]["device"],
        "versions": record["environment"],
    }
    entries = []
    for timed in record["prefill"]:
        if timed["method"] == HEADWISE:
            count = len(timed["rounds"])
            # The fastest dense baseline first, as a speed-up is quoted.
            for name in sorted(timed["speedups"], key=timed["speedups"].get):
                dense = timed["seconds"] * timed["speedups"][name]
                own = _entry(
                    "prefill", timed["seconds"], dense, timed["length"], count, "s", common
                )
                entries.append({**own, "baseline_name": EVIDENCE[name]})
    for length in record["settings"]["lengths"]:
        for task, kind in summary_tasks(record, length):
            ours = figure(record, task, length, HEADWISE, kind)
            baseline = figure(record, task, length, BASELINE, kind)
            if ours and baseline:
                name = f"{kind}: {task}"
                values = ours["value"], baseline["value"]
                entries.append(_entry(name, *values, length, ours["count"], "", common))
    return [entry for entry in entries if math.isfinite(entry["value"])]


def _entry(
    name: str,
    value: float,
    dense: float,
    length: int,
    samples: int,
    unit: str,
    common: dict[str, Any],
) -> dict[str, Any]:
    return {
        **common,
        "name": name,
        "value": value,
        "unit": unit,
        "baseline": dense,
        "baseline_name": "dense attention",
        "length": length,
        "samples": samples,
    }
