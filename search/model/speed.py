"""Speed of the accepted allocation on this machine: attention alone, and a whole prefill.

Both are against the fastest dense baseline, interleaved with it, on a held-out prompt. The resume
file keeps the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from artifacts import Artifact
from kernels.index import TILE
from profiling.environment import environment
from profiling.ledger import Unit
from profiling.progress import phase
from profiling.quality.sequences import TokenSequence
from profiling.speed.baselines import HEADWISE, KERNEL, LEAST, MODEL, dense
from profiling.speed.latency import prefill, time_calls
from profiling.speed.layer_times import ANCHOR, SDPA, PlansToTime, Timings, all_threads, time_layers
from runtime import LoadedArtifact, apply_dense
from runtime.devices import execution_device
from search.model.run import CHOSEN, SearchRun

# Fractions of the prompt at which attention is timed as well, the layers, and the fewest tokens.
_SHARES = (1 / 2, 1 / 4, 1 / 8)
_LAYERS = 6
_SHORTEST = 256
# Rounds of whole prefills: the least, the most, and the fraction of the search's time so far that
# those beyond the least may take.
_LEAST = 3
_MOST = LEAST
_SHARE = 0.1


def time_attention(run: SearchRun) -> dict[int, Timings]:
    """Time attention by the accepted allocation and densely, on the whole prompt and shorter.

    Returns:
        Seconds by tokens.
    """
    sequence = run.timed_sequence
    tokens = sequence.context
    plans = {CHOSEN: run.plans(run.allocation)}
    shorter = {round(tokens * share) // TILE * TILE for share in _SHARES}
    timed = [PlansToTime(tokens=tokens, plans=plans, sdpa=True)]
    for length in sorted(shorter, reverse=True):
        if length >= _SHORTEST:
            timed.append(PlansToTime(tokens=length, plans=plans, layers=_LAYERS, sdpa=True))

    def measure() -> list[Any]:
        with phase("timing attention", 1, "passes") as shown:
            timings = time_layers(
                run.loaded, sequence.ids[:tokens], timed, run.layers, backend=run.backend
            )
            shown.update()
        return [{"seconds": dict(each.seconds), "layers": list(each.layers)} for each in timings]

    unit = _unit(run, "times of attention", {"lengths": [each.tokens for each in timed]})
    timing = run.ledger.once(unit, measure)
    timings = [Timings(seconds=each["seconds"], layers=tuple(each["layers"])) for each in timing]
    return {each.tokens: times for each, times in zip(timed, timings, strict=True)}


def shortest_gain(attention: Mapping[int, Timings]) -> int:
    """The fewest tokens of a prompt that gains.

    That is the shortest of those that were timed, going down as long as they gain; where the
    longest does not, it is one token more.
    """
    ordered = sorted(attention, reverse=True)
    faster = takewhile(lambda tokens: attention[tokens].ratio(CHOSEN) > 1, ordered)
    return min(faster, default=ordered[0] + 1)


def longest_sdpa(attention: Mapping[int, Timings]) -> tuple[int, Timings] | None:
    """The most tokens at which sdpa was timed, with the times; None where it was not."""
    timed = [tokens for tokens, timings in attention.items() if SDPA in timings.seconds]
    if not timed:
        return None
    return max(timed), attention[max(timed)]


def prefill_seconds(run: SearchRun) -> float:
    """Seconds of one dense prefill, timed in the first rank; all ranks get them."""
    sequence = run.calibration[0]
    model = run.loaded.model

    def measure() -> float:
        ids = _prompt(model, sequence)
        with all_threads():
            taken = time_calls(
                {KERNEL: lambda: prefill(model, ids)},
                contexts={KERNEL: lambda: apply_dense(model, by="auto")},
                repeats=0,
                device=run.device,
                quiet=True,
            )
        return taken[KERNEL][0]

    seconds = None
    if run.ranks.is_first:
        with all_threads():
            machine = environment(run.device)
        depends = {"sequence": sequence.digest, "machine": machine}
        seconds = run.ledger.once(run.ledger.unit("seconds of a prefill", depends), measure)
    shared: float = run.ranks.broadcast(seconds)
    return shared


def time_prefills(run: SearchRun, artifact: Artifact) -> dict[str, Sequence[float]]:
    """Time whole prefills by the runtime: the artifact and the fastest dense baseline.

    Returns:
        Seconds of each round by name, of the baseline and HEADWISE; nothing where the artifact
        would serve the prompt densely.
    """
    sequence = run.timed_sequence
    if artifact.prefill.dense_below > sequence.context:
        return {}
    model = run.loaded.model
    seconds = run.longest.seconds
    if seconds[ANCHOR] <= seconds.get(SDPA, seconds[ANCHOR]):
        baseline = KERNEL
    else:
        baseline = MODEL
    methods: dict[str, Callable[[], AbstractContextManager[object]]] = {
        baseline: partial(dense, model, baseline),
        HEADWISE: partial(LoadedArtifact(artifact).apply, model, check_weights=False),
    }

    def measure() -> dict[str, list[float]]:
        ids = _prompt(model, sequence)
        taken: dict[str, list[float]] = {name: [] for name in methods}
        began = time.monotonic()
        limit = _SHARE * (began - run.began)
        with all_threads(), phase("timing whole prefills", _MOST, "rounds") as shown:
            while another_round(shown.done, time.monotonic() - began, limit):
                # No untimed run first: the search has run the model, and long prefills take their
                # time.
                round_ = time_calls(
                    dict.fromkeys(methods, lambda: prefill(model, ids)),
                    contexts=methods,
                    repeats=0,
                    device=run.device,
                )
                for name, values in round_.items():
                    taken[name] += values
                shown.update()
        return taken

    depends = {"baseline": baseline, "dense below": artifact.prefill.dense_below}
    return dict(run.ledger.once(_unit(run, "times of whole prefills", depends), measure))


def _prompt(model: Any, sequence: TokenSequence) -> torch.Tensor:
    """The context of a sequence as a batch of one, (1, S)."""
    return torch.tensor(
        [sequence.ids[: sequence.context]], device=execution_device(model), dtype=torch.long
    )


def another_round(done: int, seconds: float, limit: float) -> bool:
    """True while one more round of whole prefills is due.

    Three are always made, for a verdict by an interval: six of the search's ninety passes or more.
    More are made as long as all together take at most `limit`.

    Args:
        done: rounds so far.
        seconds: that they took.
        limit: seconds that rounds beyond the least may take, all together.
    """
    if done < _LEAST:
        return True
    return done < _MOST and seconds + seconds / done <= limit


def clock_drift(run: SearchRun) -> float:
    """Dense attention's time now over its time when candidates were timed."""
    costs = run.costs
    assert costs.table is not None, "seconds are spent"
    then = costs.table.dense_seconds(
        length=costs.length, head_dim=costs.head_dim, dtype=costs.dtype, heads=run.model.num_heads
    )
    return run.longest.seconds[ANCHOR] / (len(run.layers) * then)


def _unit(run: SearchRun, name: str, depends: Mapping[str, Any]) -> Unit:
    """The unit of times on this machine, of the accepted allocation."""
    with all_threads():
        machine = environment(run.device)
    about = {
        "allocation": run.allocation.digest,
        "sequence": run.timed_sequence.digest,
        "machine": machine,
    }
    return run.ledger.unit(name, {**about, **depends})
