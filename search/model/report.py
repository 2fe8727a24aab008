"""Report of a finished search: the patterns, what held-out prompts lose, seconds, and last the
verdict."""

from __future__ import annotations

from pathlib import Path

from artifacts import Artifact
from profiling.environment import device_name
from profiling.speed.baselines import HEADWISE, KERNEL, MODEL, rows, sentence, speedup
from profiling.speed.layer_times import ANCHOR, SDPA
from search.model.record import Recorded
from search.model.setup import Outcome
from search.model.speed import CHOSEN, Speed, pace
from search.model.task_losses import line, pooled, remedy, summary, verdict

# How many times as long a prompt is advised where one is too short to gain.
_LONGER = 4


def report(recorded: Recorded) -> str:
    """The report of a search with one budget for the model."""
    outcome = recorded.outcome
    artifact = recorded.artifact
    config = outcome.setup.config
    lines = [*_patterns(artifact), *_losses(outcome)]
    if recorded.speed is not None:
        lines += _seconds(outcome, recorded.speed)
    if artifact.prefill.front is not None:
        points = artifact.prefill.front.points
        lines.append(
            f"{len(points)} points to choose from when it is loaded: "
            f"{artifact.prefill.front.offers()}"
        )
    lines += ["", headline(recorded), _budget(outcome)]
    if recorded.written:
        lines += [_wrote(artifact, config.out), _next(config.out, config.model)]
    else:
        lines.append(f"{config.out} was not written: --keep writes it all the same")
    return "\n".join(lines)


def report_published(artifact: Artifact, out: Path, model: str) -> str:
    """The report of a search with a budget for each head, which measures nothing end to end.

    Args:
        artifact: as it was written.
        out: where.
        model: as it was named to the search.
    """
    search = artifact.search
    assert search is not None, "a search has just written it"
    budget = f"budget   {search.budget} for each head: {search.target_density:.4f} of its attention"
    proof = (
        "not proven: nothing was run on held-out prompts, and nothing was "
        "timed; headwise gate and evaluate do that"
    )
    return "\n".join(
        [*_patterns(artifact), "", proof, budget, _wrote(artifact, out), _next(out, model)]
    )


def headline(recorded: Recorded) -> str:
    """The verdict in one line: seconds to the first token, attention alone, answers."""
    outcome = recorded.outcome
    speed = recorded.speed
    length = outcome.setup.length
    tasks = outcome.gated.chosen.tasks
    if not recorded.is_worth_serving:
        return (
            f"not worth serving at {length:,} tokens: {_too_little(recorded)}; {_advice(outcome)}"
        )
    if speed is None:
        fast = (
            f"{1 / recorded.gain:.2f} of dense attention's FLOPs at {length:,} tokens "
            f"({recorded.gain:.2f}x fewer), "
            "counted and not timed"
        )
    elif (whole := speed.first_token) is None:
        fast = (
            f"attention alone {recorded.gain:.2f}x the fastest dense "
            f"attention's speed at {length:,} tokens"
        )
    else:
        fast = (
            f"{_of(whole.dense)} -> {_of(whole.headwise)} s to the first token at {length:,} "
            f"tokens "
            f"({whole.ratio:.2f}x the fastest dense attention's); attention alone "
            f"{recorded.gain:.2f}x"
        )
    held = verdict(tasks)
    if held.proven:
        return f"{fast}; {summary(tasks)}"
    return f"{fast}; not proven: {held.why}; {remedy(tasks, outcome.setup.config.samples)}"


def _too_little(recorded: Recorded) -> str:
    """What is gained where that is not worth it."""
    speed = recorded.speed
    if speed is None:
        return f"{recorded.gain:.2f}x fewer FLOPs of attention, counted and not timed"
    if (whole := speed.first_token) is not None and whole.ratio < 1:
        return f"{whole.ratio:.2f}x to the first token, attention alone {recorded.gain:.2f}x"
    return f"{recorded.gain:.2f}x"


def _advice(outcome: Outcome) -> str:
    """What may gain more."""
    length = outcome.setup.length
    most = outcome.setup.model.max_positions
    if outcome.setup.config.budget is not None and outcome.raised is None:
        return "try a smaller --budget"
    if length < most:
        return f"try --length {min(_LONGER * length, most)}"
    return "the model takes no longer prompts"


def _budget(outcome: Outcome) -> str:
    """What was asked for and spent, and why where that is more."""
    asked = (
        f"budget   asked {outcome.setup.config.share:g}, spent "
        f"{outcome.spent:.3f} of all of attention"
    )
    said = f"{asked} in {outcome.costs.unit}"
    return said if outcome.raised is None else f"{said}: {outcome.raised}"


def _patterns(artifact: Artifact) -> list[str]:
    """What was found: kinds of patterns, and what they keep and compute."""
    search = artifact.search
    prefill = artifact.prefill
    assert search is not None, "a search has just made it"
    found = search.summary
    heads = sum(found.winners.values())
    left = sum(row is None for row in prefill.layers)
    lengths = ", ".join(f"{length:,}" for length in search.calibration.lengths)
    tasks = ", ".join(search.calibration.tasks)
    lines = [
        f"{artifact.model.name}: patterns for {heads} heads, searched on {tasks} at {lengths} "
        f"tokens"
    ]
    if left:
        lines.append(
            f"{left} of {artifact.model.num_layers} layers are left alone: they slide or have no "
            f"attention"
        )
    lines += [
        f"  {kind:<16}{count:>5}  {count / heads:6.1%}" for kind, count in found.winners.items()
    ]
    tail = f"the last {prefill.dense_tail} queries, and " if prefill.dense_tail else ""
    return [
        *lines,
        f"recall   {found.recall:.4f}",
        f"density  {found.density:.4f}",
        f"error    {found.error:.4f}  (relative L2 of a head's output)",
        f"dense    {tail}prompts shorter than {prefill.dense_below:,} tokens",
    ]


def _losses(outcome: Outcome) -> list[str]:
    """What each task of the held-out prompts loses against dense attention."""
    gated = outcome.gated
    tasks = outcome.gated.chosen.tasks
    if not gated.held_out:
        which = "prompts by which the budget was raised, none are left to hold out,"
    elif gated.chosen_on:
        which = "held-out prompts (others raised the budget)"
    else:
        which = "held-out prompts"
    return [
        f"{which} against dense attention:",
        *(f"  {line(task)}" for task in (*tasks, *pooled(tasks))),
    ]


def _seconds(outcome: Outcome, speed: Speed) -> list[str]:
    """Seconds to the first token, then those of attention alone, each against dense attention."""
    length = outcome.setup.length
    seconds = speed.longest.seconds
    lines = [f"on {device_name(outcome.setup.config.device)} at {length:,} tokens"]
    if (whole := speed.first_token) is not None:
        lines.append(f"to the first token, median of {whole.rounds} interleaved rounds:")
        lines += rows({whole.baseline: whole.dense, HEADWISE: whole.headwise})
    dense = {
        name: seconds[timed]
        for name, timed in ((MODEL, SDPA), (KERNEL, ANCHOR))
        if timed in seconds
    }
    compared = speedup([seconds[CHOSEN]], {name: [taken] for name, taken in dense.items()})
    lines.append(f"attention alone: {sentence(compared)}")
    lines += rows({**dense, HEADWISE: seconds[CHOSEN]})
    predicted = outcome.gated.chosen.allocation.cost * pace(outcome, speed.longest)
    lines[-1] += f"  (predicted {predicted:.3f} s, {predicted / seconds[CHOSEN] - 1:+.0%})"
    return lines


def _wrote(artifact: Artifact, out: Path) -> str:
    return f"wrote {out}, {artifact.sidecar.file if artifact.sidecar else ''}"


def _next(out: Path, model: str) -> str:
    return f"next, on text like yours: headwise gate {out} --model {model} --task text:FILE"


def _of(seconds: float) -> str:
    """Seconds in two digits or three."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"
