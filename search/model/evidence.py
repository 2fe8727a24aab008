"""Evidence of a searched artifact: losses on held-out prompts, and times on this machine."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from artifacts import Evidence, Measurement, PromptSet
from profiling.environment import environment
from profiling.quality.sequences import TokenSequence
from profiling.speed.baselines import EVIDENCE, KERNEL, MODEL
from profiling.speed.layer_times import ANCHOR, MOVED, SDPA
from search.model.acceptance import Accepted
from search.model.costs import Costs
from search.model.search_run import SearchRun
from search.model.speed import CHOSEN, Speed, pace
from search.model.task_losses import pooled, verdict

# Names of sets of prompts.
HELD_OUT = "held-out"
CHOSE = "by which the budget was raised"


def evidence(
    run: SearchRun, accepted: Accepted, costs: Costs, speed: Speed | None, *, command: str
) -> Evidence:
    """The evidence of an accepted allocation; without a speed that of tasks alone."""
    tasks = accepted.measured.tasks
    chosen_on = None
    if accepted.chosen_on:
        chosen_on = prompt_set(CHOSE, accepted.chosen_on)
    measurements: tuple[Measurement, ...] = ()
    if speed is not None:
        measurements = tuple(_measurements(run, accepted, costs, speed, command))
    return Evidence(
        verdict=verdict(tasks),
        chosen_on=chosen_on,
        reported_on=prompt_set(HELD_OUT if accepted.held_out else CHOSE, accepted.reported_on),
        tasks=tuple(task.figures(run.length) for task in (*tasks, *pooled(tasks))),
        measurements=measurements,
    )


def prompt_set(name: str, sequences: Sequence[TokenSequence]) -> PromptSet:
    """The record of a set of prompts."""
    content = json.dumps([sequence.digest for sequence in sequences]).encode()
    return PromptSet(name=name, prompts=len(sequences), sha256=hashlib.sha256(content).hexdigest())


def _measurements(
    run: SearchRun, accepted: Accepted, costs: Costs, speed: Speed, command: str
) -> Iterator[Measurement]:
    """Times against dense attention, and of attention against the prediction."""
    versions = environment(run.device)
    shared: dict[str, Any] = {
        "command": command or "headwise search",
        "device": versions.pop("device"),
        "versions": versions,
        "length": run.length,
        "unit": "s",
    }
    first_token = speed.first_token
    if first_token is not None:
        yield Measurement(
            name="seconds to the first token",
            value=first_token.headwise,
            baseline=first_token.dense,
            baseline_name=EVIDENCE[first_token.baseline],
            samples=first_token.speedup.rounds,
            **shared,
        )
    shared |= {"name": "attention of one prefill, index build included", "samples": 1}
    seconds = speed.longest.seconds
    yield Measurement(
        value=seconds[CHOSEN],
        baseline=seconds[ANCHOR],
        baseline_name=EVIDENCE[KERNEL],
        **shared,
    )
    if speed.by_sdpa is not None:
        tokens, timings = speed.by_sdpa
        yield Measurement(
            value=timings.seconds[CHOSEN],
            baseline=timings.seconds[SDPA],
            baseline_name=EVIDENCE[MODEL],
            **{**shared, "length": tokens},
        )
    # The machine may be faster or slower than when candidates were timed: the anchor shows it.
    now = pace(run, costs, speed.longest)
    if abs(now - 1) > MOVED:
        print(
            f"dense attention takes {now:.2f} times as long as when candidates were timed: other "
            "work ran during one of the two; the same command on a quiet machine measures costs "
            "again",
            file=sys.stderr,
        )
    predicted = accepted.measured.allocation.cost * now
    yield Measurement(
        value=seconds[CHOSEN], baseline=predicted, baseline_name="predicted", **shared
    )
