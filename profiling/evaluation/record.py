"""An evaluation as one typed record, from which tables, sentences, page and JSON are made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from artifacts import Artifact, Measurement
from profiling.environment import environment
from profiling.evaluation.config import Evaluation
from profiling.evaluation.measure import Measured
from profiling.evaluation.methods import Methods
from profiling.evaluation.rows import DECODED, KL, NLL, PERPLEXITY, SCORE
from profiling.evaluation.summary import ALL, BASELINE, Curve, Estimate, GridCell, summarize
from profiling.evaluation.summary import curves as curves_of
from profiling.evaluation.summary import grid as grid_of
from profiling.evaluation.times import TimeRow, Times
from profiling.models.loading import LoadedModel
from profiling.prompts.held_out import Overlap
from profiling.prompts.prompt import Fewer
from profiling.speed.baselines import EVIDENCE, HEADWISE, KERNEL, MODEL
from runtime.devices import execution_device


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """A method at one length, as profiling.quality.method.Method has it.

    Attributes:
        says, source: one line on the computation, and where it comes from.
    """

    name: str
    length: int
    density: float | None
    kept: float | None
    sizes: str
    says: str
    source: str
    identity: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """All measurements of an evaluation, with what they depend on.

    Attributes:
        seeds: of the artifacts' searches, by the names of their rows.
        estimates: by task, measure, method and length.
        seen_by_search, fewer_prompts: of each task and length with such prompts.
    """

    command: str
    artifact: Artifact
    seeds: Mapping[str, int]
    config: Evaluation
    device: str
    dtype: str
    environment: Mapping[str, str]
    methods: tuple[MethodRow, ...] = ()
    estimates: tuple[Estimate, ...] = ()
    curves: tuple[Curve, ...] = ()
    grid: tuple[GridCell, ...] = ()
    seen_by_search: tuple[Overlap, ...] = ()
    fewer_prompts: tuple[Fewer, ...] = ()
    times: Times = field(default_factory=Times)

    @property
    def lengths(self) -> list[int]:
        """Lengths of prompts, and of the caches that decode was timed with."""
        timed = (*self.times.prefill, *self.times.decode)
        return sorted({*self.config.lengths, *(row.length for row in timed)})

    def estimate(self, task: str, measure: str, method: str, length: int) -> Estimate | None:
        """The estimate of a method; None where nothing was measured."""
        return self._estimates.get((task, measure, method, length))

    def columns(self, length: int) -> list[tuple[str, str]]:
        """List (task, measure) of a summary: all answers first, then each task."""
        here = [each for each in self.estimates if each.length == length]
        counts = Counter((each.task, each.measure) for each in here)
        tasks = dict.fromkeys(each.task for each in here)
        columns = []
        for task in sorted(tasks, key=lambda name: name != ALL):
            wanted = [SCORE, PERPLEXITY]
            if task == ALL:
                wanted += [NLL, KL]
            if (task, PERPLEXITY) in counts:
                wanted.append(KL)
            # Under a cache of its own only the end of a text has losses.
            if counts[task, DECODED] > counts[task, PERPLEXITY]:
                wanted.append(DECODED)
            columns += [(task, measure) for measure in wanted if (task, measure) in counts]
        return columns

    @cached_property
    def _estimates(self) -> dict[tuple[str, str, str, int], Estimate]:
        return {
            (each.task, each.measure, each.method, each.length): each for each in self.estimates
        }


def record_of(
    methods: Methods,
    config: Evaluation,
    measured: Measured,
    times: Times,
    *,
    artifact: Artifact,
    loaded: LoadedModel,
    command: str,
) -> Record:
    """Join all measurements with the model, artifact, settings and environment."""
    device = str(execution_device(loaded.model))
    return Record(
        command=command,
        artifact=artifact,
        seeds=methods.seeds,
        config=config,
        device=device,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        environment=environment(device),
        methods=tuple(
            _method(methods, name, length) for length in config.lengths for name in config.methods
        ),
        estimates=tuple(summarize(measured.rows)),
        curves=tuple(curves_of(measured.rows)),
        grid=tuple(grid_of(measured.rows)),
        seen_by_search=tuple(measured.seen_by_search),
        fewer_prompts=tuple(measured.fewer_prompts),
        times=times,
    )


def _method(methods: Methods, name: str, length: int) -> MethodRow:
    method = methods.make(name, length)
    says, source = methods.says(name)
    return MethodRow(
        name=name,
        length=length,
        density=method.density,
        kept=method.kept,
        sizes=method.sizes,
        says=says,
        source=source,
        identity=method.identity,
    )


def as_json(record: Record) -> dict[str, Any]:
    """The record as plain data: the content of evaluation.json but for its tables."""
    times = record.times
    return {
        "command": record.command,
        "model": {
            "name": record.artifact.model.name,
            "weights_sha256": record.artifact.model.weights_sha256,
        },
        "artifact": {
            "content_sha256": record.artifact.content_sha256,
            "dense_below": record.artifact.prefill.dense_below,
            "seeds": dict(record.seeds),
        },
        "settings": {
            **asdict(record.config),
            "tasks": list(map(str, record.config.tasks)),
            "device": record.device,
            "dtype": record.dtype,
        },
        "environment": dict(record.environment),
        "methods": _plain(record.methods),
        "figures": _plain(record.estimates),
        "curves": _plain(record.curves),
        "grid": _plain(record.grid),
        "seen_by_search": [each._asdict() for each in record.seen_by_search],
        "fewer_prompts": [each._asdict() for each in record.fewer_prompts],
        "prefill": [_timed(row, seconds=row.seconds) for row in times.prefill],
        "attention": _plain(times.attention),
        "decode": [
            _timed(
                row,
                tokens_per_second=1 / row.seconds,
                cache_bytes=row.timed.cache,
                bank_bytes=row.timed.bank,
                steps=row.timed.steps,
            )
            for row in times.decode
        ],
        "memory": _plain(times.memory),
    }


def _plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _timed(row: TimeRow, **fields: Any) -> dict[str, Any]:
    return {
        "method": row.method,
        "length": row.length,
        **fields,
        "speedups": dict(row.timed.speedup.over),
        "rounds": row.timed.seconds,
        "dense_rounds": {MODEL: row.timed.model, KERNEL: row.timed.kernel},
    }


def evidence_of(record: Record) -> tuple[Measurement, ...]:
    """An artifact's evidence: its figures at each length next to dense attention's."""
    entries = [*_time_evidence(record), *_quality_evidence(record)]
    common: dict[str, Any] = {
        "command": record.command,
        "device": record.device,
        "versions": dict(record.environment),
    }
    return tuple(
        Measurement(**common, **entry) for entry in entries if math.isfinite(entry["value"])
    )


def _time_evidence(record: Record) -> Iterator[dict[str, Any]]:
    for row in record.times.prefill:
        if row.method != HEADWISE:
            continue
        over = row.timed.speedup.over
        # The fastest dense baseline first, as a speed-up is quoted.
        for name in sorted(over, key=lambda each: over[each]):
            yield {
                "name": "prefill",
                "value": row.seconds,
                "unit": "s",
                "baseline": row.seconds * over[name],
                "baseline_name": EVIDENCE[name],
                "length": row.length,
                "samples": len(row.timed.seconds),
            }


def _quality_evidence(record: Record) -> Iterator[dict[str, Any]]:
    for length in record.config.lengths:
        for task, measure in record.columns(length):
            ours = record.estimate(task, measure, HEADWISE, length)
            dense = record.estimate(task, measure, BASELINE, length)
            if ours and dense:
                yield {
                    "name": f"{measure}: {task}",
                    "value": ours.value,
                    "unit": "",
                    "baseline": dense.value,
                    "baseline_name": "dense attention",
                    "length": length,
                    "samples": ours.count,
                }
