"""What an evaluation found as plain data: the one JSON, the text table, and the summary that goes into an artifact."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from artifacts import Artifact
from artifacts.page_layout import aligned
from profiling.environment import environment
from profiling.evaluation.measure import Evaluation, Outcome
from profiling.evaluation.methods import Methods
from profiling.evaluation.rows import (
    ALL,
    BASELINE,
    CHOICE,
    NEARNESS,
    NLL,
    PERPLEXITY,
    SCORE,
    Figure,
    curves,
    figures,
    grid,
)
from profiling.evaluation.speed import Timed
from profiling.evaluation.times import Times
from profiling.models.loading import LoadedModel
from profiling.prompts.held_out import overlap_sentence
from profiling.prompts.settings import HIGH, LOW, settings
from profiling.speed.baselines import COLUMNS, EVIDENCE, HEADWISE, KERNEL, MODEL, Speedup, cells, speedup


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
    found = figures(outcomes)
    device, dtype = str(loaded.model.device), str(loaded.model.dtype).removeprefix("torch.")
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
        "methods": [_method(methods, name, length) for length in config.lengths for name in config.methods],
        "figures": [asdict(figure) for figure in found],
        "measures": _measures(artifact.model.name, found),
        "curves": [asdict(curve) for curve in curves(outcomes)],
        "grid": [asdict(cell) for cell in grid(outcomes)],
        "seen_by_search": _seen(outcomes),
        **timed_record(times),
    }


def _measures(model: str, found: Sequence[Figure]) -> list[dict[str, Any]]:
    """Of each task with a forced choice which measure counts, by the model's settings or by how dense attention did."""
    known = {(each.task, each.length): each.measure for each in settings(model)}
    dense = {(each.task, each.length, each.measure): each.value for each in found if each.method == BASELINE}
    told = []
    for task, length in [place[:2] for place in dense if place[2] == CHOICE]:
        shows = LOW <= dense.get((task, length, SCORE), 0.0) <= HIGH
        measure = SCORE if known.get((task, length), "score" if shows else "choice") == "score" else CHOICE
        told.append({"task": task, "length": length, "measure": measure})
    return told


def _seen(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """How many prompts of a task and length the search had looked at, where it was any."""
    found = {(each.task, each.length): (each.overlapping, len(each.records)) for each in outcomes if each.overlapping}
    return [
        {"task": task, "length": length, "overlapping": overlapping, "samples": samples}
        for (task, length), (overlapping, samples) in found.items()
    ]


def _method(methods: Methods, name: str, length: int) -> dict[str, Any]:
    made = methods.make(name, length)
    what, source = methods.says(name)
    return {
        "name": name,
        "length": length,
        "density": made.density,
        "kept": made.kept,
        "sizes": made.sizes,
        "says": what,
        "source": source,
        "identity": made.identity,
    }


def timed_record(times: Times | None) -> dict[str, Any]:
    """What was timed; methods of other rounds by the ratio to one dense figure."""
    if times is None:
        return {"prefill": [], "decode": [], "memory": [], "crossover": None}
    prefill = _rounds(times.prefill, lambda timed, slow: {"seconds": timed.median * slow, "build": timed.build * slow})
    decode = _rounds(
        times.decode,
        lambda timed, slow: {
            "tokens_per_second": 1 / (timed.median * slow),
            "cache_bytes": timed.cache,
            "steps": timed.steps,
        },
    )
    memory = [{"method": name, "length": length, "bytes": held} for (name, length), held in times.memory.items()]
    found = None if times.crossover is None else asdict(times.crossover)
    return {"prefill": prefill, "decode": decode, "memory": memory, "crossover": found}


def _rounds(
    times: Mapping[tuple[str, int], Timed], told: Callable[[Timed, float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Methods may be timed in other rounds than those before them, on a busier machine: `told` has the factor.

    It makes a method's seconds those of one dense figure, Headwise's kernel's in its last rounds, by their ratio.
    """
    dense = {length: timed.median for (name, length), timed in times.items() if name == KERNEL}
    return [
        {
            "method": name,
            "length": length,
            **told(timed, dense[length] / timed.speedup.over[KERNEL] / timed.median),
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
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def figure(record: dict[str, Any], task: str, length: int, method: str, measure: str) -> dict[str, Any] | None:
    """One figure of a record; None where there is none."""
    wanted = {"task": task, "length": length, "method": method, "measure": measure}
    return next((each for each in record["figures"] if wanted.items() <= each.items()), None)


def summary_tasks(record: dict[str, Any], length: int) -> list[tuple[str, str]]:
    """(task, measure) of the columns of a summary: answers together first, then each task by its own measure."""
    here = [each for each in record["figures"] if each["length"] == length]
    of = {each["task"]: each["measure"] for each in record.get("measures", []) if each["length"] == length}
    tasks = dict.fromkeys(each["task"] for each in here)
    found = []
    for task in sorted(tasks, key=lambda name: name != ALL):
        measures = {each["measure"] for each in here if each["task"] == task}
        found += [(task, measure) for measure in (of.get(task, SCORE), PERPLEXITY) if measure in measures]
        if task == ALL and NLL in measures:
            found.append((task, NLL))
    return found


def shown(found: dict[str, Any] | None) -> str:
    """A figure in a few characters: its value, + or - where it is better or worse than dense, ? where none can tell."""
    if found is None:
        return "-"
    none = "?" if found.get("few") else " "
    return number(found["value"]) + {"better": "+", "worse": "-", "": none}[found["verdict"]]


def table(record: dict[str, Any]) -> str:
    """The summary as text, a block for each length; + and - mark what differs from dense."""
    blocks = []
    for length in record["settings"]["lengths"]:
        columns = summary_tasks(record, length)
        head = ["", "density", "kept", *(f"{task}" if kind == SCORE else f"{task} {kind}" for task, kind in columns)]
        timed = {each["method"]: each for each in record["prefill"] if each["length"] == length}
        lines = [[*head, *(["prefill s", *COLUMNS] if timed else [])]]
        for method in methods_at(record, length):
            name = method["name"]
            line = [shown(figure(record, task, length, name, kind)) for task, kind in columns]
            if timed:
                own = timed.get(name)
                line += [f"{own['seconds']:.3f}" if own else "-", *cells(speedup_of(own) if own else None)]
            lines.append([name, number(method["density"]), number(method["kept"]), *line])
        blocks.append(
            "\n".join(
                [
                    f"{length} tokens (+ better, - worse than dense beyond chance, ? too few prompts to tell)",
                    *aligned(lines),
                ]
            )
        )
        near = nearness(record, length)
        if near:
            blocks.append("\n".join([f"{length} tokens, beside dense attention's predictions", *aligned(near)]))
    if record["crossover"]:
        blocks.append(crossover_sentence(record))
    blocks += told_seen(record)
    return "\n\n".join(blocks)


def nearness(record: dict[str, Any], length: int) -> list[list[str]]:
    """A table of how near each method is to dense attention, its head first; empty where that was not asked for.

    A cell is the mean and its 95% interval over prompts.
    """
    here = [each for each in record["figures"] if each["length"] == length and each["measure"] in NEARNESS]
    columns = sorted(
        dict.fromkeys((each["task"], each["measure"]) for each in here),
        key=lambda column: (column[0] != ALL, column[0], NEARNESS.index(column[1])),
    )
    if not columns:
        return []
    rows = []
    for name in dict.fromkeys(each["method"] for each in here):
        found = [figure(record, task, length, name, measure) for task, measure in columns]
        rows.append([name, *("-" if each is None else _bounded(each) for each in found)])
    return [["", *(f"{task} {measure}" for task, measure in columns)], *rows]


def _bounded(found: dict[str, Any]) -> str:
    value, low, high = (f"{found[name]:.4f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})" if found["count"] > 1 else value


def methods_at(record: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """The methods at a length, and dense attention by Headwise's kernel after the model's own where it was timed."""
    found = [each for each in record["methods"] if each["length"] == length]
    timed = {each["method"] for each in record["prefill"] if each["length"] == length}
    if KERNEL in timed and all(each["name"] != KERNEL for each in found):
        found.insert(1, {"name": KERNEL, "length": length, "density": 1.0, "kept": 1.0})
    return found


def speedup_of(timed: dict[str, Any]) -> Speedup:
    """The speed-up of an entry of `prefill` or `decode`."""
    return speedup(timed["rounds"], timed["dense_rounds"])


def told_seen(record: dict[str, Any]) -> list[str]:
    """A sentence for each task of which the search had seen prompts."""
    return [overlap_sentence(**each) for each in record["seen_by_search"]]


def crossover_sentence(record: dict[str, Any]) -> str:
    """The crossover in a sentence."""
    found = record["crossover"]
    lengths = [length for length, _ in found["measured"]]
    if found["length"] is None:
        return (
            "prefill was slower than the fastest dense baseline at every length that was timed, "
            f"up to {max(lengths)} tokens"
        )
    already = ", the shortest that was timed" if found["length"] == min(lengths) else ""
    return f"prefill is faster than the fastest dense baseline from {found['length']} tokens on{already}"


def attached(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Fields of the artifact's evidence: Headwise's own figures at each length, with dense attention's beside them."""
    common = {
        "command": record["command"],
        "device": record["settings"]["device"],
        "versions": record["environment"],
    }
    entries = []
    for length in record["settings"]["lengths"]:
        for task, kind in summary_tasks(record, length):
            own, dense = (figure(record, task, length, name, kind) for name in ("headwise", BASELINE))
            if own and dense:
                name = f"{kind}: {task}"
                entries.append(_entry(name, own["value"], dense["value"], length, own["count"], "", common))
    for timed in record["prefill"]:
        if timed["method"] == HEADWISE:
            count = len(timed["rounds"])
            # The fastest dense baseline first, as a speed-up is quoted.
            for name in sorted(timed["speedups"], key=timed["speedups"].get):
                dense = timed["seconds"] * timed["speedups"][name]
                own = _entry("prefill", timed["seconds"], dense, timed["length"], count, "s", common)
                entries.append({**own, "baseline_name": EVIDENCE[name]})
    if record["crossover"] and record["crossover"]["length"]:
        entries.append(
            {
                **common,
                "name": "faster than dense from",
                "value": float(record["crossover"]["length"]),
                "unit": "tokens",
            }
        )
    return [entry for entry in entries if math.isfinite(entry["value"])]


def _entry(
    name: str, value: float, dense: float, length: int, samples: int, unit: str, common: dict[str, Any]
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
