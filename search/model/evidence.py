"""Evidence of a searched artifact: what held-out tasks lose, and what attention and a prefill take
on this machine."""

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
from search.model.setup import Outcome
from search.model.speed import CHOSEN, Speed, pace
from search.model.task_losses import pooled, verdict

# What sets of prompts are called.
HELD_OUT = "held-out"
CHOSE = "by which the budget was raised"


def evidence(outcome: Outcome, speed: Speed | None) -> Evidence:
    """Its figures; without a speed those of tasks alone."""
    gated = outcome.gated
    tasks = outcome.gated.chosen.tasks
    return Evidence(
        verdict=verdict(tasks),
        chosen_on=prompt_set(CHOSE, gated.chosen_on) if gated.chosen_on else None,
        reported_on=prompt_set(HELD_OUT if gated.held_out else CHOSE, gated.reported_on),
        tasks=tuple(task.figures(outcome.setup.length) for task in (*tasks, *pooled(tasks))),
        measurements=() if speed is None else tuple(_measurements(outcome, speed)),
    )


def prompt_set(name: str, found: Sequence[TokenSequence]) -> PromptSet:
    """The record of a set of prompts."""
    content = json.dumps([one.digest for one in found]).encode()
    return PromptSet(name=name, prompts=len(found), sha256=hashlib.sha256(content).hexdigest())


def _measurements(outcome: Outcome, speed: Speed) -> Iterator[Measurement]:
    """Times on this machine against dense attention, and of attention against what was
    predicted."""
    where = environment(outcome.setup.config.device)
    shared: dict[str, Any] = {
        "command": outcome.setup.config.command or "headwise search",
        "device": where.pop("device"),
        "versions": where,
        "length": outcome.setup.length,
        "unit": "s",
    }
    if (whole := speed.first_token) is not None:
        yield Measurement(
            name="seconds to the first token",
            value=whole.headwise,
            baseline=whole.dense,
            baseline_name=EVIDENCE[whole.baseline],
            samples=whole.rounds,
            **shared,
        )
    shared |= {"name": "attention of one prefill, index build included", "samples": 1}
    seconds = speed.longest.seconds
    for dense, called in ((ANCHOR, EVIDENCE[KERNEL]), (SDPA, EVIDENCE[MODEL])):
        if dense in seconds:
            yield Measurement(
                value=seconds[CHOSEN], baseline=seconds[dense], baseline_name=called, **shared
            )
    # The machine may be faster or slower than it was when candidates were timed: the anchor shows
    # it.
    now = pace(outcome, speed.longest)
    if abs(now - 1) > MOVED:
        print(
            f"dense attention takes {now:.2f} times what it took when candidates were timed: other "
            f"work ran beside "
            "one of the two; the same command on a quiet machine measures costs again",
            file=sys.stderr,
        )
    predicted = outcome.gated.chosen.allocation.cost * now
    yield Measurement(
        value=seconds[CHOSEN], baseline=predicted, baseline_name="predicted", **shared
    )
