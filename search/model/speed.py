"""Speed of the accepted allocation on this machine: attention alone, and a whole prefill.

Both are against the fastest dense baseline, interleaved with it, on a held-out prompt. The resume
file keeps the times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from statistics import median
from typing import Any

import torch

from artifacts import Artifact
from kernels.index import TILE
from profiling.environment import environment
from profiling.progress import phase
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, dense
from profiling.speed.latency import interleaved, prefill
from profiling.speed.layer_times import ANCHOR, SDPA, Timed, Timings, all_threads, time_layers
from runtime import Headwise
from search.model.setup import Outcome

CHOSEN = "chosen"
# Shares of the prompt at which attention is timed, too, on so many layers, down to so many tokens.
_SHARES = (1 / 2, 1 / 4, 1 / 8)
_LAYERS = 6
_SHORTEST = 256
# Rounds of whole prefills: the least, the most, and the seconds after which no more are begun.
_LEAST = 2
_MOST = 6
_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """Seconds from a prompt to its first token, medians of interleaved rounds.

    baseline: the fastest dense baseline, MODEL or KERNEL of profiling.speed.baselines.
    """

    baseline: str
    dense: float
    headwise: float
    rounds: int

    @property
    def ratio(self) -> float:
        """How many times as fast as the fastest dense baseline."""
        return self.dense / self.headwise


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed against dense attention.

    attention: of attention alone, by tokens. searched: the tokens that were searched for, the
    longest first. first_token: of a whole prefill of the longest; None where none was timed."""

    attention: Mapping[int, Timings]
    searched: tuple[int, ...]
    first_token: FirstToken | None = None

    @property
    def longest(self) -> Timings:
        """Attention over the whole prompt."""
        return self.attention[max(self.attention)]

    @property
    def gain(self) -> float:
        """How many times as fast attention is as the fastest dense baseline.

        Of the searched lengths at which the artifact is served the best counts; where there is
        none, the longest does."""
        served = [tokens for tokens in self.searched if tokens >= self.dense_below]
        return max(self.attention[tokens].ratio(CHOSEN) for tokens in served or self.searched[:1])

    @property
    def dense_below(self) -> int:
        """The fewest tokens of a prompt that gains.

        That is the shortest of those that were timed, going down as long as they gain; where the
        longest does not, it is one token more."""
        ordered = sorted(self.attention, reverse=True)
        faster = takewhile(lambda tokens: self.attention[tokens].ratio(CHOSEN) > 1, ordered)
        return min(faster, default=ordered[0] + 1)


def attention_speed(outcome: Outcome) -> Speed:
    """Time attention of the accepted allocation and dense attention, at the prompt's length and at
    shorter ones."""
    one = outcome.gated.reported_on[0]
    setup = outcome.setup
    plans = {CHOSEN: setup.plans(outcome.gated.chosen.allocation)}
    others = {
        tokens
        for tokens in setup.candidates
        if _SHORTEST <= tokens < min(one.context, setup.length)
    }
    shares = {round(one.context * share) // TILE * TILE for share in _SHARES}
    shorter = sorted(others | {tokens for tokens in shares if tokens >= _SHORTEST}, reverse=True)
    asked = [Timed(tokens=one.context, plans=plans, sdpa=True)]
    asked += [Timed(tokens=tokens, plans=plans, layers=_LAYERS, sdpa=True) for tokens in shorter]

    def find() -> list[Any]:
        ids = one.ids[: one.context]
        with phase("timing", 1, "passes") as shown:
            timings = time_layers(setup.loaded, ids, asked, setup.searched, backend=setup.backend)
            shown.update()
        return [{"seconds": dict(each.seconds), "layers": list(each.layers)} for each in timings]

    kept = _once(outcome, "times of attention", {"lengths": [each.tokens for each in asked]}, find)
    timings = [Timings(seconds=each["seconds"], layers=tuple(each["layers"])) for each in kept]
    return Speed(
        attention={each.tokens: found for each, found in zip(asked, timings, strict=True)},
        searched=(one.context, *sorted(others, reverse=True)),
    )


def first_token(outcome: Outcome, artifact: Artifact, speed: Speed) -> FirstToken | None:
    """Time whole prefills by the runtime, with the artifact applied and by the fastest dense
    baseline.

    None where the artifact would serve the prompt densely, and where weights come in from elsewhere
    layer by layer, which takes longer than attention does."""
    setup = outcome.setup
    one = outcome.gated.reported_on[0]
    if artifact.prefill.dense_below > one.context or setup.config.max_memory is not None:
        return None
    seconds = speed.longest.seconds
    baseline = KERNEL if seconds[ANCHOR] <= seconds.get(SDPA, seconds[ANCHOR]) else MODEL
    model = setup.loaded.model
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        baseline: partial(dense, model, baseline),
        HEADWISE: partial(Headwise(artifact).apply, model, check_weights=False),
    }

    def find() -> dict[str, list[float]]:
        ids = torch.tensor([one.ids[: one.context]], device=model.device)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        began = time.monotonic()
        with all_threads(), phase("timing whole prefills", _MOST, "rounds") as shown:
            while (rounds := len(taken[HEADWISE])) < _MOST:
                if rounds >= _LEAST and time.monotonic() - began > _SECONDS:
                    break
                # Not once untimed before: the search has run the model, and long prefills take
                # their time.
                found = interleaved(
                    ways, lambda: prefill(model, ids), repeats=0, device=setup.config.device
                )
                for name, values in found.items():
                    taken[name] += values
                shown.update()
        return taken

    depends = {"baseline": baseline, "dense below": artifact.prefill.dense_below}
    taken = _once(outcome, "times of whole prefills", depends, find)
    return FirstToken(
        baseline=baseline,
        dense=median(taken[baseline]),
        headwise=median(taken[HEADWISE]),
        rounds=len(taken[HEADWISE]),
    )


def pace(outcome: Outcome, timings: Timings) -> float:
    """Times as long as dense attention takes now as it took when candidates were timed."""
    costs = outcome.costs
    model = outcome.setup.model
    layers = len(outcome.setup.searched)
    assert costs.table is not None, "seconds are spent"
    then = costs.table.dense_seconds(
        length=costs.length, head_dim=costs.head_dim, dtype=costs.dtype, heads=model.num_heads
    )
    return timings.seconds[ANCHOR] / (layers * then)


def _once(outcome: Outcome, name: str, depends: Mapping[str, Any], find: Callable[[], Any]) -> Any:
    """What was timed before, on this machine and of the same allocation, or else what `find`
    times."""
    setup = outcome.setup
    with all_threads():
        machine = environment(setup.config.device)
    about = {
        "allocation": outcome.gated.chosen.allocation.digest,
        "sequence": outcome.gated.reported_on[0].digest,
        "machine": machine,
    }
    return setup.ledger.once(setup.ledger.unit(name, {**about, **depends}), find)
