"""Checks of the sidecar: that its arrays fit the model and the YAML, and what scores say, found here or imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from artifacts.errors import number, plural
from artifacts.lint.rules import Case, Finding, layers, odd

if TYPE_CHECKING:
    from artifacts.sidecar import Array

LOW_RECALL = 0.5
# float32 means of shares end up a rounding error above 1.
ONE = 1.0001
_PER_HEAD = ("chosen.", "candidates.", "imported.score")
_PER_KV_HEAD = ("imported.full_attention",)


def sidecar(case: Case) -> Iterator[Finding]:
    """No sidecar, or one that is not the YAML's."""
    if case.fault is not None:
        yield odd("sidecar", "sidecar", why=case.fault)
    elif case.artifact.sidecar is None and case.named:
        yield odd("no-sidecar", "sidecar")


def shapes(case: Case) -> Iterator[Finding]:
    """Arrays with another number of layers or heads than the model's."""
    model = case.artifact.model
    wrong = []
    for name, array in sorted(_entries(case).items()):
        heads = model.num_kv_heads if name in _PER_KV_HEAD else model.num_heads
        if name.startswith((*_PER_HEAD, *_PER_KV_HEAD)) and array.shape[:2] != (model.num_layers, heads):
            wrong.append((name, {"shape": tuple(array.shape), "layers": model.num_layers, "heads": heads}))
    if wrong:
        more = f" (and {len(wrong) - 1} arrays more)" if len(wrong) > 1 else ""
        yield odd("head-counts:array", wrong[0][0], **wrong[0][1], more=more)


def ranges(case: Case) -> Iterator[Finding]:
    """Recalls that are no shares, errors below 0, scores where there is no pattern and none where there is one."""
    for name, array in sorted(_tables(case).items()):
        measure = name.rpartition(".")[2]
        if measure not in ("recall", "density", "error"):
            continue
        highest, wanted = (ONE, "from 0 to 1") if measure == "recall" else (float("inf"), "at least 0")
        if wrong := [value for value in _known(array) if not 0 <= value <= highest]:
            heads = plural(len(wrong), "head")
            yield odd("score-range", name, heads=heads, value=wrong[0], measure=measure, wanted=wanted)
        if name.startswith("chosen."):
            rows = zip(array.tolist(), case.artifact.prefill.layers, strict=True)
            scored = [(any(value == value for value in values), row is not None) for values, row in rows]
            if gaps := [i for i, (score, pattern) in enumerate(scored) if score != pattern]:
                yield odd("score-gap", name, layers=layers(gaps))


def summary(case: Case) -> Iterator[Finding]:
    """A summary that does not say what the rows and the arrays say."""
    artifact, search = case.artifact, case.artifact.search
    if search is None:
        return
    won = Counter(str(artifact.patterns[name].kind) for row in artifact.prefill.layers for name in row or ())
    said = {kind: count for kind, count in search.summary.winners.items() if count}
    if said != dict(won):
        yield odd("stale-summary", "search.summary.winners", said=_counts(said), found=_counts(won))
    for measure in ("recall", "density"):
        array, stated = f"chosen.{measure}", getattr(search.summary, measure)
        values = _known(_tables(case).get(array))
        if values and abs((mean := sum(values) / len(values)) - stated) > 0.005:
            yield odd("stale-summary:mean", f"search.summary.{measure}", said=stated, array=array, mean=mean)


def low_recall(case: Case) -> Iterator[Finding]:
    """Heads whose sparse pattern keeps less than half of their attention."""
    artifact, imported = case.artifact, case.artifact.prefill.imported
    there = "chosen.recall" in (case.arrays or {}) or imported is None or imported.scores != "recall"
    name = "chosen.recall" if there else "imported.score"
    table = _tables(case).get(name)
    if table is None:
        return
    low = Counter[int]()
    worst = 1.0
    for layer, row in enumerate(artifact.prefill.layers):
        for pattern, value in zip(row or (), table[layer].tolist(), strict=False):
            if value < LOW_RECALL and artifact.patterns[pattern].kind != "dense":
                low[layer] += 1
                worst = min(worst, value)
    if low:
        most = {"layer": low.most_common(1)[0][0], "layers": plural(len(low), "layer"), "worst": worst}
        yield odd("low-recall", name, heads=plural(low.total(), "head"), share=LOW_RECALL, **most)


def imports(case: Case) -> Iterator[Finding]:
    """Imported scores that are no recalls, of two scales, or all alike."""
    imported, where = case.artifact.prefill.imported, "imported.score"
    if imported is None:
        return
    values = _known(_tables(case).get(where))
    shares = [value for value in values if 0 < value < 1]
    larger = [value for value in values if value > ONE]
    if imported.scores is None or not values:
        yield odd("no-scores", "prefill.imported.scores")
    elif shares and larger:
        counts = {"shares": plural(len(shares), "head"), "larger": plural(len(larger), "head")}
        yield odd("mixed-scales", where, **counts, most=max(larger))
    elif larger:
        yield odd("foreign-scores", where, least=number(min(values)), most=number(max(values)))
    elif max(values) > 1:
        heads = plural(sum(value > 1 for value in values), "head")
        yield odd("score-above-one", where, heads=heads, most=max(values))
    if len(values) > 1 and len(set(values)) == 1 and any(values):
        yield odd("constant-scores", where, score=values[0])


def precision(case: Case) -> Iterator[Finding]:
    """Imported recalls of some patterns in half precision beside those of others in full."""
    imported, table = case.artifact.prefill.imported, _tables(case).get("imported.score")
    if imported is None or imported.scores != "recall" or table is None:
        return
    by_pattern: dict[str, list[float]] = {}
    for row, values in zip(case.artifact.prefill.layers, table.tolist(), strict=True):
        for name, value in zip(row or (), values, strict=False):
            by_pattern.setdefault(name, []).append(value)
    # bfloat16 steps by 1/256 from a half on, and by 1/512 below.
    coarse = [
        name for name, values in by_pattern.items() if len(values) > 1 and all(value * 512 % 1 == 0 for value in values)
    ]
    if coarse and len(coarse) < len(by_pattern):
        heads = plural(sum(len(by_pattern[name]) for name in coarse), "head")
        yield odd("mixed-precision", "imported.score", names=", ".join(coarse[:3]), heads=heads)


CHECKS = (sidecar, shapes, ranges, summary, low_recall, imports, precision)


def _entries(case: Case) -> Mapping[str, Any]:
    """What the sidecar's header says of its arrays, which reads none of them; or these themselves."""
    return getattr(case.arrays, "entries", case.arrays) or {}


def _tables(case: Case) -> dict[str, Array]:
    """The arrays that have a number for each head of the model."""
    shape = (case.artifact.model.num_layers, case.artifact.model.num_heads)
    arrays = case.arrays or {}
    return {name: arrays[name] for name, entry in _entries(case).items() if entry.shape == shape}


def _known(table: Array | None) -> list[float]:
    """The table's numbers that are none of NaN."""
    return [] if table is None else [value for row in table.tolist() for value in row if value == value]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts)) or "none"
