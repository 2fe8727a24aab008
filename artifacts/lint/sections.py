"""Checks of where an artifact comes from, what was measured with it, and of its front, decode and kv_cache sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from artifacts.front_rows import FRONT_ROWS, served_point
from artifacts.kv_cache import H2O, Full, Streaming
from artifacts.lint.rules import Case, Finding, layers, odd

_SECONDS = ("s", "ms", "us", "s/token", "ms/token")


def origin(case: Case) -> Iterator[Finding]:
    """Patterns that were not searched here, on one prompt only, or on other lengths than are served."""
    artifact, search, imported = case.artifact, case.artifact.search, case.artifact.prefill.imported
    if artifact.model.weights_sha256 is None:
        yield odd("no-fingerprint", "model.weights_sha256")
    if search is None:
        if imported is not None:
            yield odd("unsearched", "search", file=imported.file)
        return
    lengths, samples = search.calibration.lengths, search.calibration.samples
    longest, below, most = max(lengths), artifact.prefill.dense_below, artifact.model.max_positions
    if longest < below:
        yield odd("searched-below", "prefill.dense_below", below=below, longest=longest)
    if len(lengths) * samples == 1:
        yield odd("one-prompt", "search.calibration", longest=longest)
    elif len(set(lengths)) == 1:
        yield odd("one-length", "search.calibration.lengths", longest=longest)
    if most >= 4 * longest:
        yield odd("short-search", "search.calibration.lengths", longest=longest, most=most)


def edits(case: Case) -> Iterator[Finding]:
    """Fields that were set by hand after the search."""
    if made := case.artifact.edits:
        more = f" and {len(made) - 1} more" if len(made) > 1 else ""
        last = made[-1]
        yield odd("edited", "edits", field=last.field, before=last.before, after=last.after, more=more)


def evidence(case: Case) -> Iterator[Finding]:
    """Nothing measured, nothing to compare with, or a measurement that speaks against the artifact."""
    if not case.artifact.evidence:
        yield odd("no-evidence", "evidence")
    for i, entry in enumerate(case.artifact.evidence.measurements):
        where, value = f"evidence.measurements[{i}]", f"{entry.value:.4g} {entry.unit}"
        if entry.baseline is None:
            yield odd("no-baseline", where, name=entry.name, value=value)
        elif entry.unit in _SECONDS and entry.value > entry.baseline:
            length = f" at {entry.length:,} tokens" if entry.length else ""
            against = {"baseline_name": entry.baseline_name, "baseline": entry.baseline}
            yield odd("slower", where, name=entry.name, value=value, length=length, **against)


def front(case: Case) -> Iterator[Finding]:
    """Points for prompts that are served densely or were searched on, and rows that are no point."""
    found, below = case.artifact.prefill.front, case.artifact.prefill.dense_below
    if found is None:
        return
    if found.length < below:
        yield odd("front-below", "prefill.front.length", length=found.length, below=below)
    if found.measured_on == "calibration":
        yield odd("in-sample-front", "prefill.front.measured_on")
    if FRONT_ROWS in (case.arrays or {}) and served_point(case.artifact, case.arrays) is None:
        yield odd("off-front", "prefill.layers")


def decode(case: Case) -> Iterator[Finding]:
    """Filter layers that serve nobody, are too many, are no better than evenly spaced ones, or were not compared."""
    section, model = case.artifact.decode, case.artifact.model
    if section is None:
        return
    omnikv, where = section.omnikv, "decode.omnikv"
    full = {*omnikv.filter_layers, *omnikv.dense_layers, *range(omnikv.filter_layers[0])}
    if len(full) >= model.num_layers:
        yield odd("no-sparse-layer", where)
    elif len(full) * 2 > model.num_layers:
        yield odd("few-sparse-layers", where, full=len(full), layers=model.num_layers)
    if isinstance(omnikv.budget, int) and omnikv.budget >= model.max_positions:
        yield odd("impossible-budget", f"{where}.budget", tokens=omnikv.budget, most=model.max_positions)
    kept = omnikv.similarity
    if kept is None:
        yield odd("no-similarity", f"{where}.similarity")
    elif kept.kept < kept.evenly_spaced:
        yield odd("poor-filters", f"{where}.similarity", kept=kept.kept, even=kept.evenly_spaced)


def kv_cache(case: Case) -> Iterator[Finding]:
    """Policies that free nothing, keep no sinks, or can never evict."""
    section, model, prefill = case.artifact.kv_cache, case.artifact.model, case.artifact.prefill
    if section is None:
        return
    counts = Counter[str]()
    for layer in range(len(section.layers)):
        counts.update(section.heads(layer, model.num_kv_heads) or ())
    if all(isinstance(policy, Full) for policy in section.policies.values()):
        yield odd("nothing-freed", "kv_cache")
    elif counts.total() > 1 and len(counts) == 1:
        yield odd("uniform-cache", "kv_cache.layers", heads=f"{counts.total():,} KV heads", name=next(iter(counts)))
    for name, policy in section.policies.items():
        where, tokens = f"kv_cache.policies.{name}", _kept(policy)
        if isinstance(policy, Streaming) and policy.sinks == 0:
            yield odd("no-sinks", where)
        if tokens is not None and tokens >= model.max_positions:
            yield odd("impossible-budget", where, tokens=tokens, most=model.max_positions)
    rows = zip(section.layers, prefill.layers, strict=True)
    if unlike := [i for i, (policies, patterns) in enumerate(rows) if policies is None and patterns is not None]:
        yield odd("sliding-layers", "kv_cache.layers", layers=layers(unlike))


def _kept(policy: object) -> int | None:
    if isinstance(policy, Streaming):
        return policy.sinks + policy.window
    if isinstance(policy, H2O) and isinstance(policy.heavy, int) and isinstance(policy.recent, int):
        return policy.heavy + policy.recent
    return None


CHECKS = (origin, edits, evidence, front, decode, kv_cache)
