"""Checks of the sidecar: that its arrays fit the model and the YAML, and what the scores say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from artifacts.lint.finding import Case, Finding, heads, some

if TYPE_CHECKING:
    from artifacts.sidecar import Array

LOW_RECALL = 0.5
# float32 means of shares end up a rounding error above 1.
ONE = 1.0001
_PER_HEAD = ("chosen.", "candidates.", "imported.")


def sidecar(case: Case) -> Iterator[Finding]:
    """No sidecar, or one that is not the YAML's."""
    if case.fault is not None:
        yield Finding(code="sidecar", severity="error", where="sidecar", message=case.fault)
    elif case.artifact.sidecar is None and case.named:
        yield Finding(
            code="no-sidecar",
            severity="warning",
            where="sidecar",
            message="there is no file of scores: nobody can say why a head got its pattern; search again, or keep "
            "the pair together",
        )


def shapes(case: Case) -> Iterator[Finding]:
    """Arrays with another number of layers or heads than the model's."""
    model = case.artifact.model
    wrong = []
    for name, array in sorted(_entries(case).items()):
        if not name.startswith(_PER_HEAD):
            continue
        width = model.num_kv_heads if name == "imported.full_attention" else model.num_heads
        if array.shape[:2] != (model.num_layers, width):
            wrong.append((name, array.shape, width))
    if wrong:
        name, shape, width = wrong[0]
        more = f" (and {len(wrong) - 1} arrays more)" if len(wrong) > 1 else ""
        yield Finding(
            code="head-counts",
            severity="error",
            where=name,
            message=f"has the shape {tuple(shape)}, the model has {model.num_layers} layers of {width} heads{more}: "
            "the sidecar is of another model; search again",
        )


def _entries(case: Case) -> Mapping[str, Any]:
    """What the sidecar's header says of its arrays, which reads none of them; or these themselves."""
    return getattr(case.arrays, "entries", case.arrays) or {}


def ranges(case: Case) -> Iterator[Finding]:
    """Recalls that are no shares, errors below 0, scores where there is no pattern and none where there is one."""
    artifact = case.artifact
    has_pattern = [row is not None for row in artifact.prefill.layers]
    for name, array in sorted(tables(case).items()):
        measure = name.rpartition(".")[2]
        if measure not in ("recall", "density", "error"):
            continue
        values = [value for row in array.tolist() for value in row if value == value]
        highest = ONE if measure == "recall" else float("inf")
        if wrong := [value for value in values if not 0 <= value <= highest]:
            wanted = "from 0 to 1" if measure == "recall" else "at least 0"
            yield Finding(
                code="score-range",
                severity="error",
                where=name,
                message=f"{heads(len(wrong))} have values such as {wrong[0]:.4g}, a {measure} is {wanted}: the "
                "scores are of another scale; search again",
            )
        if name.startswith("chosen."):
            known = [[value == value for value in row] for row in array.tolist()]
            odd = [i for i, (row, there) in enumerate(zip(known, has_pattern, strict=True)) if any(row) != there]
            if odd:
                yield Finding(
                    code="score-gap",
                    severity="error",
                    where=name,
                    message=f"layer{'s' * (len(odd) > 1)} {some(odd)}: has scores without patterns or patterns without "
                    "scores: YAML and sidecar are of two searches; search again",
                )


def summary(case: Case) -> Iterator[Finding]:
    """A summary that does not say what the rows and the arrays say."""
    artifact, search = case.artifact, case.artifact.search
    if search is None:
        return
    won: Counter[str] = Counter(artifact.patterns[name].kind for row in artifact.prefill.layers for name in row or ())
    said = {kind: count for kind, count in search.summary.winners.items() if count}
    if said != dict(won):
        yield Finding(
            code="stale-summary",
            severity="error",
            where="search.summary.winners",
            message=f"says {_counts(said)}, the rows have {_counts(won)}: rows were changed after the search, and "
            "its scores are not theirs; search again",
        )
    for measure in ("recall", "density"):
        table = tables(case).get(f"chosen.{measure}")
        values = [] if table is None else [value for row in table.tolist() for value in row if value == value]
        stated = getattr(search.summary, measure)
        if values and abs(sum(values) / len(values) - stated) > 0.005:
            yield Finding(
                code="stale-summary",
                severity="error",
                where=f"search.summary.{measure}",
                message=f"says {stated:.4f}, the mean of chosen.{measure} is {sum(values) / len(values):.4f}: one of "
                "them is of another search; search again",
            )


def low_recall(case: Case) -> Iterator[Finding]:
    """Heads whose sparse pattern keeps less than half of their attention."""
    artifact = case.artifact
    imported = artifact.prefill.imported
    name = "chosen.recall"
    if "chosen.recall" not in (case.arrays or {}) and imported is not None and imported.scores == "recall":
        name = "imported.score"
    table = tables(case).get(name)
    if table is None:
        return
    low: Counter[int] = Counter()
    worst = 1.0
    for layer, row in enumerate(artifact.prefill.layers):
        for pattern, value in zip(row or (), table[layer].tolist(), strict=False):
            if value < LOW_RECALL and artifact.patterns[pattern].kind != "dense":
                low[layer] += 1
                worst = min(worst, value)
    if low:
        yield Finding(
            code="low-recall",
            severity="warning",
            where=name,
            message=f"{heads(low.total())} keep less than {LOW_RECALL:.0%} of their attention (down to {worst:.2f}; "
            f"most in layer {low.most_common(1)[0][0]}, {len(low)} layer{'s' * (len(low) > 1)} in all): whatever the "
            "budget, these heads lose; give them dense or a larger pattern",
        )


def tables(case: Case) -> Mapping[str, Array]:
    """The arrays that have a number for each head of the model."""
    model = case.artifact.model
    shape = (model.num_layers, model.num_heads)
    arrays = case.arrays or {}
    return {name: arrays[name] for name, entry in _entries(case).items() if entry.shape == shape}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts)) or "none"
