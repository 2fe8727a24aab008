"""Report of a finished search: patterns, losses on held-out prompts, seconds, and the verdict."""

from __future__ import annotations

from pathlib import Path

from artifacts import Artifact
from profiling.environment import device_name
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, rows, sentence, speedup
from profiling.speed.layer_times import ANCHOR, SDPA
from search.model.acceptance import Accepted
from search.model.config import ModelSearch
from search.model.record import Outcome, Recorded
from search.model.speed import CHOSEN, FirstToken, Speed, pace
from search.model.task_losses import line, pooled, remedy, summary, verdict

# Factor by which a longer prompt is advised where one is too short to gain.
_LONGER = 4


def report(config: ModelSearch, recorded: Recorded) -> str:
    """The report of a search with one budget for the model."""
    outcome = recorded.outcome
    artifact = recorded.artifact
    lines = [*_patterns(artifact), *_losses(outcome.accepted)]
    if recorded.speed is not None:
        lines += _seconds(config, outcome, recorded.speed)
    front = artifact.prefill.front
    if front is not None:
        lines.append(
            f"{len(front.points)} points to choose from when it is loaded: {front.offers()}"
        )
    lines += ["", headline(config, recorded), _budget(recorded)]
    if recorded.written:
        lines += [_wrote(artifact, config.out), _next(config.out, config.model)]
    else:
        lines.append(f"{config.out} was not written: --keep writes it all the same")
    return "\n".join(lines)


def report_published(artifact: Artifact, out: Path, model: str) -> str:
    """The report of a search with a budget for each head, which measures nothing end to end.

    Args:
        artifact: the written one.
        out: where.
        model: its name on the command line.
    """
    search = artifact.search
    assert search is not None, "a search has just written it"
    proof = (
        "not proven: nothing was run on held-out prompts, and nothing was timed; headwise gate and "
        "evaluate do that"
    )
    return "\n".join(
        [*_patterns(artifact), "", proof, search.spending, _wrote(artifact, out), _next(out, model)]
    )


def headline(config: ModelSearch, recorded: Recorded) -> str:
    """The verdict in one line: seconds to the first token, attention alone, answers."""
    outcome = recorded.outcome
    length = outcome.run.length
    if not recorded.is_worth_serving:
        return (
            f"not worth serving at {length:,} tokens: {_too_little(recorded)}; "
            f"{_advice(config, outcome)}"
        )
    gain = _gain(recorded, length)
    if not recorded.is_proven_faster:
        gain = (
            f"not proven faster: {gain}; on a quiet machine headwise evaluate {config.out} --model "
            f"{config.model} --speed-only times it again"
        )
    tasks = outcome.accepted.measured.tasks
    proof = verdict(tasks)
    if proof.proven:
        return f"{gain}; {summary(tasks)}"
    return f"{gain}; not proven: {proof.why}; {remedy(tasks, config.samples)}"


def _gain(recorded: Recorded, length: int) -> str:
    """The gain of an artifact that gains enough."""
    speed = recorded.speed
    gain = recorded.gain
    if speed is None:
        return (
            f"{1 / gain:.2f} of dense attention's FLOPs at {length:,} tokens ({gain:.2f}x fewer), "
            "counted and not timed"
        )
    whole = speed.first_token
    if whole is None:
        return (
            f"attention alone {gain:.2f}x the fastest dense attention's speed at {length:,} tokens"
        )
    return (
        f"{_of(whole.dense)} -> {_of(whole.headwise)} s to the first token at {length:,} tokens "
        f"({whole.ratio:.2f}x the fastest dense attention's, {_interval(whole)}); attention alone "
        f"{gain:.2f}x"
    )


def _too_little(recorded: Recorded) -> str:
    """The gain of an artifact that gains too little."""
    speed = recorded.speed
    if speed is None:
        return f"{recorded.gain:.2f}x fewer FLOPs of attention, counted and not timed"
    whole = speed.first_token
    if whole is not None and whole.ratio < 1:
        return (
            f"{whole.ratio:.2f}x to the first token ({_interval(whole)}), attention alone "
            f"{recorded.gain:.2f}x"
        )
    return f"{recorded.gain:.2f}x"


def _interval(whole: FirstToken) -> str:
    """The interval of the speed-up of whole prefills, and the number of rounds."""
    low, high = whole.interval
    return f"{low:.2f} to {high:.2f} in {whole.speedup.rounds} rounds"


def _advice(config: ModelSearch, outcome: Outcome) -> str:
    """Advice for a gain: a smaller budget or a longer prompt."""
    length = outcome.run.length
    positions = outcome.run.model.max_positions
    if config.budget is not None and outcome.raise_reason is None:
        return "try a smaller --budget"
    if length < positions:
        return f"try --length {min(_LONGER * length, positions)}"
    return "the model takes no longer prompts"


def _budget(recorded: Recorded) -> str:
    """The budget asked for and spent, with the reason where it was raised."""
    search = recorded.artifact.search
    assert search is not None, "a search has just made it"
    reason = recorded.outcome.raise_reason
    if reason is None:
        return search.spending
    return f"{search.spending}: {reason}"


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


def _losses(accepted: Accepted) -> list[str]:
    """Losses of each task of the held-out prompts against dense attention."""
    if not accepted.held_out:
        which = "prompts by which the budget was raised, none are left to hold out,"
    elif accepted.chosen_on:
        which = "held-out prompts (others raised the budget)"
    else:
        which = "held-out prompts"
    tasks = accepted.measured.tasks
    return [
        f"{which} against dense attention:",
        *(f"  {line(task)}" for task in (*tasks, *pooled(tasks))),
    ]


def _seconds(config: ModelSearch, outcome: Outcome, speed: Speed) -> list[str]:
    """Seconds to the first token, then those of attention alone, each against dense attention."""
    seconds = speed.longest.seconds
    lines = [f"on {device_name(outcome.run.device)} at {outcome.run.length:,} tokens"]
    whole = speed.first_token
    if whole is not None:
        lines.append(f"to the first token, median of {whole.speedup.rounds} interleaved rounds:")
        lines += rows({whole.baseline: whole.dense, HEADWISE: whole.headwise})
    baselines = {MODEL: SDPA, KERNEL: ANCHOR}
    dense = {name: seconds[timed] for name, timed in baselines.items() if timed in seconds}
    compared = speedup([seconds[CHOSEN]], {name: [taken] for name, taken in dense.items()})
    lines.append(f"attention alone: {sentence(compared)}")
    lines += rows({**dense, HEADWISE: seconds[CHOSEN]})
    predicted = outcome.allocation.cost * pace(outcome.run, outcome.costs, speed.longest)
    lines[-1] += f"  (predicted {predicted:.3f} s, {predicted / seconds[CHOSEN] - 1:+.0%})"
    if SDPA not in seconds and speed.by_sdpa is not None:
        tokens, timings = speed.by_sdpa
        slower = timings.seconds[SDPA] / timings.seconds[ANCHOR]
        lines.append(
            f"  default attention (sdpa): {slower:.2f} times as long as Headwise's dense kernel at "
            f"{tokens:,} tokens, not timed at {outcome.run.length:,}"
        )
    return lines


def _wrote(artifact: Artifact, out: Path) -> str:
    return f"wrote {out}, {artifact.sidecar.file if artifact.sidecar else ''}"


def _next(out: Path, model: str) -> str:
    return f"next, on text like yours: headwise gate {out} --model {model} --task text:FILE"


def _of(seconds: float) -> str:
    """Seconds in two digits or three."""
    if seconds >= 1:
        return f"{seconds:.1f}"
    return f"{seconds:.3f}"
