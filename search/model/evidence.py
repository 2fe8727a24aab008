"""What an artifact says of itself: what held-out tasks lose, and what attention takes on this machine."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from artifacts import Evidence, Measurement, PromptSet
from kernels.index import TILE
from profiling.environment import environment
from profiling.progress import phase
from profiling.quality.sequences import TokenSequence
from profiling.speed.baselines import EVIDENCE, KERNEL, MODEL
from profiling.speed.layer_times import ANCHOR, MOVED, SDPA, Timed, Timings, time_layers
from search.model.setup import Outcome
from search.model.task_losses import pooled

_CHOSEN = "chosen"
# What sets of prompts are called.
HELD_OUT, CHOSE = "held-out", "by which the budget was raised"
# Shares of the prompt that are timed, too, on so many layers, down to so many tokens.
_SHARES, _LAYERS, _SHORTEST = (1 / 2, 1 / 4, 1 / 8), 6, 256


def timed(outcome: Outcome) -> tuple[Timings, int]:
    """Seconds of what was chosen and of dense attention on a held-out prompt, and from which length on it is faster.

    That is the shortest of the prompt's length, a half, a quarter and an eighth of it that gains, going down; where the
    whole length does not, it is one token more.
    """
    one, setup = outcome.gated.reported_on[0], outcome.setup
    ids, plans = one.ids[: one.context], {_CHOSEN: setup.plans(outcome.gated.chosen.allocation)}
    shorter = [round(one.context * share) // TILE * TILE for share in _SHARES]
    asked = [Timed(tokens=one.context, plans=plans, sdpa=True)]
    asked += [Timed(tokens=tokens, plans=plans, layers=_LAYERS, sdpa=True) for tokens in shorter if tokens >= _SHORTEST]
    with phase("timing", 1, "passes") as shown:
        found = time_layers(setup.loaded, ids, asked, setup.searched, backend=setup.backend)
        shown.update()
    faster = takewhile(lambda pair: pair[1].ratio(_CHOSEN) > 1, zip(asked, found, strict=True))
    return found[0], min((each.tokens for each, _ in faster), default=one.context + 1)


def evidence(outcome: Outcome, timings: Timings | None) -> Evidence:
    """Its figures; without timings those of tasks alone."""
    gated, tasks = outcome.gated, outcome.gated.chosen.tasks
    return Evidence(
        chosen_on=prompt_set(CHOSE, gated.chosen_on) if gated.chosen_on else None,
        reported_on=prompt_set(HELD_OUT if gated.held_out else CHOSE, gated.reported_on),
        tasks=tuple(task.figures(outcome.setup.length) for task in (*tasks, *pooled(tasks))),
        measurements=_measurements(outcome, timings),
    )


def prompt_set(name: str, found: Sequence[TokenSequence]) -> PromptSet:
    """The record of a set of prompts."""
    content = json.dumps([one.digest for one in found]).encode()
    return PromptSet(name=name, prompts=len(found), sha256=hashlib.sha256(content).hexdigest())


def _measurements(outcome: Outcome, timings: Timings | None) -> tuple[Measurement, ...]:
    """Times of attention on this machine, beside dense attention and beside what was predicted."""
    if timings is None:
        return ()
    where = environment(outcome.setup.config.device)
    shared: dict[str, Any] = {
        "command": outcome.setup.config.command or "headwise search",
        "device": where.pop("device"),
        "versions": where,
        "length": outcome.setup.length,
        "samples": 1,
        "unit": "s",
    }
    seconds, name = timings.seconds[_CHOSEN], "attention of one prefill, index build included"
    measured = [
        Measurement(name=name, value=seconds, baseline=timings.seconds[dense], baseline_name=said, **shared)
        for dense, said in ((ANCHOR, EVIDENCE[KERNEL]), (SDPA, EVIDENCE[MODEL]))
        if dense in timings.seconds
    ]
    # The machine may be faster or slower than it was when candidates were timed: the anchor shows it.
    costs, model, layers = outcome.costs, outcome.setup.model, len(outcome.setup.searched)
    assert costs.table is not None
    then = costs.table.dense_seconds(
        length=costs.length, head_dim=costs.head_dim, dtype=costs.dtype, heads=model.num_heads
    )
    pace = timings.seconds[ANCHOR] / (layers * then)
    if abs(pace - 1) > MOVED:
        print(
            f"dense attention takes {pace:.2f} times what it took when candidates were timed: other work ran beside "
            "one of the two; the same command on a quiet machine measures costs again",
            file=sys.stderr,
        )
    predicted = outcome.gated.chosen.allocation.cost * pace
    measured.append(Measurement(name=name, value=seconds, baseline=predicted, baseline_name="predicted", **shared))
    return tuple(measured)
