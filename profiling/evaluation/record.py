"""An evaluation as plain data: the content of evaluation.json, and an artifact's evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from artifacts import Artifact
from profiling.environment import environment
from profiling.evaluation.config import Evaluation
from profiling.evaluation.measure import Measured
from profiling.evaluation.methods import Methods
from profiling.evaluation.rows import KL, NLL, PERPLEXITY, SCORE
from profiling.evaluation.speed import Timed
from profiling.evaluation.summary import ALL, BASELINE, curves, grid, summarize
from profiling.evaluation.times import Times
from profiling.models.loading import LoadedModel
from profiling.speed.baselines import EVIDENCE, HEADWISE, KERNEL, MODEL
from runtime.devices import execution_device


def record_of(
    artifact: Artifact,
    methods: Methods,
    config: Evaluation,
    measured: Measured,
    times: Times | None,
    *,
    loaded: LoadedModel,
    command: str,
) -> dict[str, Any]:
    """Return all measurements, with the model, artifact, settings and environment."""
    device = str(execution_device(loaded.model))
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
        "figures": [asdict(estimate) for estimate in summarize(measured.rows)],
        "curves": [asdict(curve) for curve in curves(measured.rows)],
        "grid": [asdict(cell) for cell in grid(measured.rows)],
        "seen_by_search": measured.seen_by_search,
        "fewer_prompts": measured.fewer_prompts,
        **timed_record(times),
    }


def _method(methods: Methods, name: str, length: int) -> dict[str, Any]:
    method = methods.make(name, length)
    description, source = methods.says(name)
    return {
        "name": name,
        "length": length,
        "density": method.density,
        "kept": method.kept,
        "sizes": method.sizes,
        "says": description,
        "source": source,
        "identity": method.identity,
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
    return {"prefill": prefill, "attention": attention, "decode": decode, "memory": memory}


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


Figures = dict[tuple[str, str, str], dict[str, Any]]
"""Estimates of one length as plain data, by task, measure and method."""


def figures_at(record: Mapping[str, Any], length: int) -> Figures:
    """The estimates of a record at one length."""
    return {
        (each["task"], each["measure"], each["method"]): each
        for each in record["figures"]
        if each["length"] == length
    }


def summary_tasks(figures: Figures) -> list[tuple[str, str]]:
    """List (task, measure) of a summary's columns: all answers first, then each task."""
    present = {place[:2] for place in figures}
    columns = []
    for task in sorted(dict.fromkeys(task for task, _, _ in figures), key=lambda name: name != ALL):
        wanted = [SCORE, PERPLEXITY]
        if task == ALL:
            wanted += [NLL, KL]
        if (task, PERPLEXITY) in present:
            wanted.append(KL)
        columns += [(task, measure) for measure in wanted if (task, measure) in present]
    return columns


def evidence_entries(record: dict[str, Any]) -> list[dict[str, Any]]:
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
        figures = figures_at(record, length)
        for task, measure in summary_tasks(figures):
            ours = figures.get((task, measure, HEADWISE))
            baseline = figures.get((task, measure, BASELINE))
            if ours and baseline:
                name = f"{measure}: {task}"
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
