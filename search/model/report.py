"""What a finished search says: the patterns, what held-out prompts lose, what attention costs, and what to do next."""

from __future__ import annotations

from pathlib import Path

from artifacts import Artifact, Measurement, load_arrays
from artifacts.front_rows import served_point
from profiling.speed.baselines import EVIDENCE, HEADWISE, KERNEL, rows, sentence, speedup
from search.model.evidence import CHOSE
from search.model.task_losses import line

# Under this name a search writes down what it expected.
_PREDICTED = "predicted"


def report(artifact: Artifact, out: Path, model: str) -> str:
    """The report of an artifact that a search has just written to `out`; model: as it was named to the search."""
    search = artifact.search
    assert search is not None, "a search has just written it"
    summary = search.summary
    heads = sum(summary.winners.values())
    left = sum(row is None for row in artifact.prefill.layers)
    lengths = ", ".join(f"{length:,}" for length in search.calibration.lengths)
    tasks = ", ".join(search.calibration.tasks)
    lines = [f"{artifact.model.name}: patterns for {heads} heads, searched on {tasks} at {lengths} tokens"]
    if left:
        lines.append(f"{left} of {artifact.model.num_layers} layers are left alone: they slide or have no attention")
    lines += [f"  {kind:<16}{count:>5}  {count / heads:6.1%}" for kind, count in summary.winners.items()]
    prefill = artifact.prefill
    lines += [
        f"recall   {summary.recall:.4f}",
        f"density  {summary.density:.4f}  (budget {search.budget}: {_spent(artifact, out)})",
        f"error    {summary.error:.4f}  (relative L2 of a head's output)",
        f"dense    {f'the last {prefill.dense_tail} queries, and ' if prefill.dense_tail else ''}"
        f"prompts shorter than {prefill.dense_below:,} tokens",
        *_quality(artifact),
        *_times(artifact, out),
    ]
    if prefill.front is not None:
        lines.append(f"{len(prefill.front.points)} points to choose from when it is loaded: {prefill.front.offers()}")
    lines.append(f"wrote {out}, {artifact.sidecar.file if artifact.sidecar else ''}")
    lines.append(f"next, on text like yours: headwise gate {out} --model {model} --task text:FILE")
    return "\n".join(lines)


def _quality(artifact: Artifact) -> list[str]:
    """What each task of the held-out prompts loses against dense attention."""
    evidence = artifact.evidence
    if not evidence.tasks:
        return ["not checked on held-out prompts: headwise gate does that"]
    assert evidence.reported_on is not None, "a search names its prompts"
    if evidence.reported_on.name == CHOSE:
        which = "prompts by which the budget was raised, none are left to hold out,"
    else:
        which = "held-out prompts" + (" (others raised the budget)" if evidence.chosen_on else "")
    return [f"{which} against dense attention:", *(f"  {line(task)}" for task in evidence.tasks)]


def _times(artifact: Artifact, out: Path) -> list[str]:
    """Seconds beside both dense attentions, the better one first in what is claimed; or predicted cost alone."""
    by_name = {one.baseline_name: one for one in artifact.evidence.measurements if one.baseline_name}
    if EVIDENCE[KERNEL] not in by_name:
        return _counted(artifact, out)
    found = by_name[EVIDENCE[KERNEL]]
    dense = {name: _baseline(by_name[said]) for name, said in EVIDENCE.items() if said in by_name}
    how = sentence(speedup([found.value], {name: [seconds] for name, seconds in dense.items()}))
    lines = [f"attention of one prefill of {found.length or 0:,} tokens ({found.device}): {how}"]
    lines += rows({**dense, HEADWISE: found.value})
    if _PREDICTED in by_name:
        predicted = _baseline(by_name[_PREDICTED])
        lines[-1] += f"  (predicted {predicted:.3f} s, {predicted / found.value - 1:+.0%})"
    return lines


def _counted(artifact: Artifact, out: Path) -> list[str]:
    """Where nothing was timed: what the point that is served costs by the search's own count."""
    cost = _cost(artifact, out)
    return [] if cost is None else [f"cost     {cost}, counted; not timed here"]


def _spent(artifact: Artifact, out: Path) -> str:
    """What a budget came to: the gate may have raised it."""
    assert artifact.search is not None, "a search has just written it"
    cost = _cost(artifact, out)
    return f"{artifact.search.target_density:.4f}" if cost is None else f"spent {cost}"


def _cost(artifact: Artifact, out: Path) -> str | None:
    """The cost of the point that is served, by the search's own count; None without a front."""
    front = artifact.prefill.front
    number = None if front is None else served_point(artifact, load_arrays(out))
    if front is None or number is None:
        return None
    return f"{front.points[number].cost / front.dense_cost:.3f} of dense attention in {front.unit}"


def _baseline(measured: Measurement) -> float:
    assert measured.baseline is not None, "it has a name"
    return measured.baseline
