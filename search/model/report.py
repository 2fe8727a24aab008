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
from search.model.losses import advice, format_row, summary, verdict
from search.model.run import CHOSEN, SearchRun
from search.model.speed import clock_drift, longest_sdpa
from search.paper_config import PaperSearch

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


def report_paper(config: PaperSearch, run: SearchRun) -> str:
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
    """The result: its name, then a line each for the time to first token, attention, answers."""
    if not run.is_worth_serving:
        return [f"result: {_too_slow(run)}; {_advice(config, run)}", *_gain(run)]
    if not run.attention:
        lines = ["result: fewer FLOPs", *_gain(run)]
    elif run.is_reliably_faster:
        lines = ["result: faster", *_gain(run)]
    else:
        lines = [
            "result: not reliably faster; on a quiet machine time it again: headwise evaluate "
            f"{config.out} --model {config.model} --speed-only",
            *_gain(run),
        ]
    proof = verdict(run.tasks)
    if proof.proven:
        return [*lines, f"  {summary(run.tasks)}"]
    return [*lines, f"  not proven: {proof.why}; {advice(run.tasks, config.samples)}"]


def _too_slow(run: SearchRun) -> str:
    """The name of the result of an artifact that gains too little."""
    if not run.attention:
        return "too many FLOPs to serve"
    return "too slow to serve"


def _gain(run: SearchRun) -> list[str]:
    """The gain over the fastest dense attention: of the first token, then of attention alone."""
    if not run.attention:
        return [
            f"  FLOPs of attention at {run.length:,} tokens: {1 / run.gain:.2f} of dense "
            f"attention's ({run.gain:.2f}x fewer), counted and not timed"
        ]
    lines = []
    if run.first_token is not None:
        dense, ours = first_token_seconds(run.prefills)
        lines.append(
            f"  time to first token at {run.length:,} tokens: {_of(dense)} s by the fastest dense "
            f"attention, {_of(ours)} s with the artifact, speedup {dense / ours:.2f}x "
            f"({interval(run.first_token)})"
        )
    return [*lines, f"  attention alone at {run.length:,} tokens: speedup {run.gain:.2f}x"]


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
    if config.budget is not None and run.gate_fault is None:
        return "try a smaller --budget"
    if run.length < positions:
        return f"try --length {min(_LONGER * run.length, positions)}"
    return "the model takes no longer prompts"


def _budget(run: SearchRun) -> list[str]:
    """The budget asked for and spent, then each reason why it was raised."""
    search = run.artifact.search
    assert search is not None, "a search has just made it"
    lines = [search.spending]
    if run.budget_reason is not None:
        lines.append(f"  raised because {run.budget_reason}")
    if run.gate_fault is not None:
        lines.append(f"  raised because the first allocation failed the gate: {run.gate_fault}")
    return lines


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
        f"recall {scores.recall:.4f}",
        scores.tiles,
        f"error {scores.error:.4f} (relative L2 of a head's output)",
        f"dense {tail}prompts shorter than {prefill.dense_below:,} tokens",
    ]


def _losses(run: SearchRun) -> list[str]:
    """Losses of each task of the held-out prompts against dense attention."""
    if not run.held_out:
        which = "prompts by which the budget was raised, none are left to hold out,"
    elif run.chosen_on:
        which = "held-out prompts (others raised the budget)"
    else:
        which = "held-out prompts"
    return [
        f"{which} against dense attention:",
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
