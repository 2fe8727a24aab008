"""Evidence of a searched artifact: losses on held-out prompts, and times on this machine."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import median
from typing import Any

from artifacts import Evidence, Measurement, PromptSet, TaskFigures
from profiling.environment import environment
from profiling.quality.sequences import TokenSequence
from profiling.speed.baselines import EVIDENCE, HEADWISE, KERNEL, MODEL
from profiling.speed.layer_times import ANCHOR, MOVED, SDPA
from search.model.run import CHOSEN, SearchRun
from search.model.speed import clock_drift, longest_sdpa

# Names of sets of prompts.
HELD_OUT = "held-out"
CHOSE = "by which the budget was chosen"


def evidence(run: SearchRun, *, command: str) -> Evidence:
    """The evidence of the accepted allocation; without timings that of tasks alone."""
    chosen_on = None
    others = [each for each in run.rounds if each is not run.accepted]
    if others:
        sequences = list(chain.from_iterable(each.sequences for each in others))
        chosen_on = prompt_set(CHOSE, sequences)
    measurements: tuple[Measurement, ...] = ()
    if run.attention:
        measurements = tuple(_measurements(run, command))
    return Evidence(
        verdict=run.accepted.proof.verdict,
        chosen_on=chosen_on,
        reported_on=prompt_set(HELD_OUT, run.accepted.sequences),
        tasks=validated(run.tasks),
        measurements=measurements,
    )


def validated(tasks: Sequence[TaskFigures]) -> tuple[TaskFigures, ...]:
    """Figures as an artifact takes them.

    Raises:
        ValidationError: one of them is not a number, or does not go with the others.
    """
    return tuple(TaskFigures(**task.model_dump()) for task in tasks)


def prompt_set(name: str, sequences: Sequence[TokenSequence]) -> PromptSet:
    """The record of a set of prompts."""
    content = json.dumps([sequence.digest for sequence in sequences]).encode()
    return PromptSet(name=name, prompts=len(sequences), sha256=hashlib.sha256(content).hexdigest())


def _measurements(run: SearchRun, command: str) -> Iterator[Measurement]:
    """Times against dense attention, and of attention against the prediction."""
    versions = environment(run.device)
    shared: dict[str, Any] = {
        "command": command or "headwise search",
        "device": versions.pop("device"),
        "versions": versions,
        "length": run.length,
        "unit": "s",
    }
    first_token = run.first_token
    if first_token is not None:
        baseline = first_token.fastest
        yield Measurement(
            name="seconds to the first token",
            value=median(run.prefills[HEADWISE]),
            baseline=median(run.prefills[baseline]),
            baseline_name=EVIDENCE[baseline],
            samples=first_token.rounds,
            **shared,
        )
    shared |= {"name": "attention of one prefill, index build included", "samples": 1}
    seconds = run.longest.seconds
    yield Measurement(
        value=seconds[CHOSEN],
        baseline=seconds[ANCHOR],
        baseline_name=EVIDENCE[KERNEL],
        **shared,
    )
    sdpa = longest_sdpa(run.attention)
    if sdpa is not None:
        tokens, timings = sdpa
        yield Measurement(
            value=timings.seconds[CHOSEN],
            baseline=timings.seconds[SDPA],
            baseline_name=EVIDENCE[MODEL],
            **{**shared, "length": tokens},
        )
    # The machine may be faster or slower than when candidates were timed: the anchor shows it.
    now = clock_drift(run)
    if abs(now - 1) > MOVED:
        print(
            f"dense attention takes {now:.2f} times as long as when candidates were timed: other "
            "work ran during one of the two; the same command on a quiet machine measures costs "
            "again",
            file=sys.stderr,
        )
    predicted = run.allocation.cost * now
    yield Measurement(
        value=seconds[CHOSEN], baseline=predicted, baseline_name="predicted", **shared
    )
