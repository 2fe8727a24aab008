"""Report of a finished search: patterns, losses on held-out prompts, seconds, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from artifacts import Artifact
from profiling.environment import device_name
from profiling.speed.baselines import (
    HEADWISE,
    KERNEL,
    MODEL,
    Speedup,
    of_rounds,
    rows,
    sentence,
    speedup,
)
from profiling.speed.layer_times import ANCHOR, SDPA
from search.model.config import ModelSearch
from search.model.frontier import table
from search.model.losses import format_row
from search.model.run import CHOSEN, SearchRun
from search.model.speed import clock_drift, longest_sdpa

# Factor by which a longer prompt is advised where one is too short to gain.
_LONGER = 4


def report(config: ModelSearch, run: SearchRun) -> str:
    """The report of a search with one budget for the model."""
    artifact = run.artifact
    lines = [*_patterns(artifact), *_losses(run)]
    if run.attention:
        lines += _seconds(run)
    front = artifact.prefill.front
    if front is not None:
        lines.append(
            f"{len(front.points)} points to choose from when it is loaded: {front.offers()}"
        )
    lines += ["", *result(config, run), *_budget(run)]
    if run.written:
        lines += [_wrote(artifact, config.out), _next(config.out, config.model)]
    else:
        lines.append(f"{config.out} was not written: --keep writes it all the same")
    return "\n".join(lines)


def report_paper(config: ModelSearch, run: SearchRun) -> str:
    """The report of a search with a budget for each head, which measures nothing end to end."""
    artifact = run.artifact
    search = artifact.search
    assert search is not None, "a search has just written it"
    proof = (
        "result: not checked; headwise gate runs held-out prompts, headwise evaluate measures the "
        "speed"
    )
    lines = [*_patterns(artifact), "", proof, search.spending]
    return "\n".join([*lines, _wrote(artifact, config.out), _next(config.out, config.model)])


def result(config: ModelSearch, run: SearchRun) -> list[str]:
    """The result: its name, then a line each for the loss that is proven, and the speed."""
    if not run.is_worth_serving:
        name = f"{_too_slow(run)}; {_advice(config, run)}"
    elif not run.attention:
        name = "fewer FLOPs"
    elif run.is_reliably_faster:
        name = "faster"
    else:
        name = (
            "not reliably faster; on a quiet machine time it again: headwise evaluate "
            f"{config.out} --model {config.model} --speed-only"
        )
    verdict = run.accepted.proof.verdict
    if not verdict.proven:
        name = f"not proven: {verdict.why}; {name}"
    return [f"result: {name}", *_gain(run)]


def _too_slow(run: SearchRun) -> str:
    """The name of the result of an artifact that gains too little."""
    if not run.attention:
        return "too many FLOPs to serve"
    return "too slow to serve"


def _gain(run: SearchRun) -> list[str]:
    """The gain over the fastest dense attention with the loss, then of attention alone."""
    losses = run.accepted.proof.verdict.losses
    if not run.attention:
        return [
            f"  FLOPs of attention at {run.length:,} tokens: {1 / run.gain:.2f} of dense "
            f"attention's ({run.gain:.2f}x fewer), counted and not timed; {losses}"
        ]
    lines = []
    if run.first_token is not None:
        lines.append(f"  {first_token(run.prefills)}; {losses}")
        lines.append(f"  speedup of {interval(run.first_token)} at {run.length:,} tokens")
    else:
        lines.append(f"  {losses}")
    return [*lines, f"  attention alone: speedup {run.gain:.2f}x"]


def first_token(prefills: Mapping[str, Sequence[float]]) -> str:
    """The time to the first token, by the fastest dense baseline and by Headwise."""
    dense, ours = first_token_seconds(prefills)
    return f"first token {_of(dense)} s -> {_of(ours)} s, {dense / ours:.2f}x"


def first_token_seconds(prefills: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Median seconds of whole prefills by the dense baseline and by Headwise."""
    return median(prefills[of_rounds(prefills, HEADWISE).fastest]), median(prefills[HEADWISE])


def interval(speedup: Speedup) -> str:
    """The interval of the speed-up of whole prefills, and the number of rounds."""
    low, high = speedup.bounds[speedup.fastest]
    return f"{low:.2f}x to {high:.2f}x in {speedup.rounds} rounds"


def _advice(config: ModelSearch, run: SearchRun) -> str:
    """Advice for a gain: a smaller budget or a longer prompt."""
    positions = run.model.max_positions
    if config.budget is not None:
        return "try a smaller --budget"
    if run.length < positions:
        return f"try --length {min(_LONGER * run.length, positions)}"
    return "the model takes no longer prompts"


def _budget(run: SearchRun) -> list[str]:
    """The budget that was spent, and the frontier of other budgets."""
    search = run.artifact.search
    assert search is not None, "a search has just made it"
    return [search.spending, *table(search.frontier, search.spent)]


def _patterns(artifact: Artifact) -> list[str]:
    """The kinds of patterns that heads got, with their recall and density."""
    search = artifact.search
    prefill = artifact.prefill
    assert search is not None, "a search has just made it"
    scores = search.summary
    heads = sum(scores.winners.values())
    without = sum(row is None for row in prefill.layers)
    tasks = ", ".join(search.calibration.tasks)
    lines = [
        f"{artifact.model.name}: patterns for {heads} heads, searched on {tasks} at "
        f"{search.calibration.length:,} tokens"
    ]
    if without:
        lines.append(
            f"{without} of {artifact.model.num_layers} layers are left alone: they slide or have "
            "no attention"
        )
    for kind, count in scores.winners.items():
        lines.append(f"  {kind:<16}{count:>5}  {count / heads:6.1%}")
    if prefill.dense_tail:
        tail = f"the last {prefill.dense_tail} queries, and "
    else:
        tail = ""
    return [
        *lines,
        *scores.means,
        f"dense {tail}prompts shorter than {prefill.dense_below:,} tokens",
    ]


def _losses(run: SearchRun) -> list[str]:
    """Losses of each task of the held-out prompts against dense attention."""
    return [
        "held-out prompts against dense attention, with 95% intervals:",
        *(f"  {format_row(task)}" for task in run.tasks),
    ]


def _seconds(run: SearchRun) -> list[str]:
    """Seconds to the first token, then those of attention alone, each against dense attention."""
    seconds = run.longest.seconds
    lines = [f"on {device_name(run.device)} at {run.length:,} tokens"]
    first_token = run.first_token
    if first_token is not None:
        dense, ours = first_token_seconds(run.prefills)
        lines.append(f"to the first token, median of {first_token.rounds} interleaved rounds:")
        lines += rows({first_token.fastest: dense, HEADWISE: ours})
    timed = {MODEL: SDPA, KERNEL: ANCHOR}
    baselines = {name: seconds[key] for name, key in timed.items() if key in seconds}
    compared = speedup([seconds[CHOSEN]], {name: [taken] for name, taken in baselines.items()})
    lines.append(f"attention alone: {sentence(compared)}")
    lines += rows({**baselines, HEADWISE: seconds[CHOSEN]})
    predicted = run.allocation.cost * clock_drift(run)
    lines[-1] += f"  (predicted {predicted:.3f} s, {predicted / seconds[CHOSEN] - 1:+.0%})"
    sdpa = longest_sdpa(run.attention)
    if SDPA not in seconds and sdpa is not None:
        tokens, timings = sdpa
        slower = timings.seconds[SDPA] / timings.seconds[ANCHOR]
        lines.append(
            f"  default attention (sdpa): {slower:.2f} times as long as Headwise's dense kernel at "
            f"{tokens:,} tokens, not timed at {run.length:,}"
        )
    return lines


def _wrote(artifact: Artifact, out: Path) -> str:
    return f"wrote {out}, {artifact.sidecar.file if artifact.sidecar else ''}"


def _next(out: Path, model: str) -> str:
    return f"next, on text like yours: headwise gate {out} --model {model} --task text:FILE"


def _of(seconds: float) -> str:
    """Seconds with two decimals, short ones with three."""
    if seconds >= 1:
        return f"{seconds:.2f}"
    return f"{seconds:.3f}"
