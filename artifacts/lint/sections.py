"""Checks of where an artifact comes from, what was measured with it, and of its decode and kv_cache sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from artifacts.kv_cache import H2O, Full, Streaming
from artifacts.lint.finding import Case, Finding, some

_SECONDS = ("s", "ms", "us", "s/token", "ms/token")


def evidence(case: Case) -> Iterator[Finding]:
    """Nothing measured, nothing to compare with, or a measurement that speaks against the artifact."""
    entries = case.artifact.evidence.measurements
    if not case.artifact.evidence:
        yield Finding(
            code="no-evidence",
            severity="warning",
            where="evidence",
            message="nothing was measured with it: whether it is faster, and still right, nobody knows; run "
            "python -m profiling.compare",
        )
    for i, entry in enumerate(entries):
        if entry.baseline is None:
            yield Finding(
                code="no-baseline",
                severity="note",
                where=f"evidence.measurements[{i}]",
                message=f"{entry.name} has no baseline: {entry.value:.4g} {entry.unit} beside nothing says little; "
                "measure dense attention in the same run",
            )
        elif entry.unit in _SECONDS and entry.value > entry.baseline:
            length = f" at {entry.length:,} tokens" if entry.length else ""
            yield Finding(
                code="slower",
                severity="warning",
                where=f"evidence.measurements[{i}]",
                message=f"{entry.name} took {entry.value:.4g} {entry.unit}{length}, {entry.baseline_name} "
                f"{entry.baseline:.4g}: raise dense_below above that length, or take smaller sizes",
            )


def origin(case: Case) -> Iterator[Finding]:
    """Patterns that were not searched here, on one prompt only, or on other lengths than are served."""
    artifact, search = case.artifact, case.artifact.search
    if artifact.model.weights_sha256 is None:
        yield Finding(
            code="no-fingerprint",
            severity="warning",
            where="model.weights_sha256",
            message="is open: the artifact is applied to any model of this shape without a word; "
            "python -m profiling.fidelity --update fills it in",
        )
    if search is None:
        if artifact.prefill.imported is not None:
            yield Finding(
                code="unsearched",
                severity="warning",
                where="search",
                message=f"the patterns were taken over from {artifact.prefill.imported.file}: no prompts, lengths or "
                "seed say on what they hold; measure them, or search",
            )
        return
    lengths, samples = search.calibration.lengths, search.calibration.samples
    longest, below, most = max(lengths), artifact.prefill.dense_below, artifact.model.max_positions
    if longest < below:
        yield Finding(
            code="searched-below",
            severity="warning",
            where="prefill.dense_below",
            message=f"prompts below {below:,} tokens are served densely, but the search saw none above {longest:,}: "
            "the patterns are used on no length that they were chosen for; search on longer prompts",
        )
    if len(lengths) * samples == 1:
        yield Finding(
            code="one-prompt",
            severity="note",
            where="search.calibration",
            message=f"was searched on a single prompt of {longest:,} tokens: chance decides between near candidates; "
            "search with --samples 3 or more",
        )
    elif len(set(lengths)) == 1:
        yield Finding(
            code="one-length",
            severity="note",
            where="search.calibration.lengths",
            message=f"was searched at {longest:,} tokens only: sizes that fit one length may not fit another",
        )
    if most >= 4 * longest:
        yield Finding(
            code="short-search",
            severity="note",
            where="search.calibration.lengths",
            message=f"was searched on prompts of up to {longest:,} tokens, the model takes {most:,}: nothing is "
            "known of the patterns there; measure them with python -m profiling.fidelity",
        )


def decode(case: Case) -> Iterator[Finding]:
    """Filter layers that serve nobody, are too many, are no better than evenly spaced ones, or were not compared."""
    section, model = case.artifact.decode, case.artifact.model
    if section is None:
        return
    omnikv, where = section.omnikv, "decode.omnikv"
    full = {*omnikv.filter_layers, *omnikv.dense_layers, *range(omnikv.filter_layers[0])}
    if len(full) >= model.num_layers:
        yield Finding(
            code="no-sparse-layer",
            severity="warning",
            where=where,
            message="every layer filters or is dense: decode attends to everything and chooses for nobody; name fewer "
            "filter layers",
        )
    elif len(full) * 2 > model.num_layers:
        yield Finding(
            code="few-sparse-layers",
            severity="note",
            where=where,
            message=f"{len(full)} of {model.num_layers} layers attend to everything: decode can win less than half",
        )
    if isinstance(omnikv.budget, int) and omnikv.budget >= model.max_positions:
        yield Finding(
            code="impossible-budget",
            severity="warning",
            where=f"{where}.budget",
            message=f"is {omnikv.budget:,} tokens, the model takes {model.max_positions:,}: nothing is ever left out",
        )
    kept = omnikv.similarity
    if kept is None:
        yield Finding(
            code="no-similarity",
            severity="note",
            where=f"{where}.similarity",
            message="how much attention the filter layers keep was not measured; python -m search.filters does",
        )
    elif kept.kept < kept.evenly_spaced:
        yield Finding(
            code="poor-filters",
            severity="warning",
            where=f"{where}.similarity",
            message=f"the filter layers keep {kept.kept:.4f} of the attention on held-out prompts, evenly spaced ones "
            f"{kept.evenly_spaced:.4f}: the choice fits its own prompts only; search on more tasks",
        )


def kv_cache(case: Case) -> Iterator[Finding]:
    """Policies that free nothing, keep no sinks, or can never evict."""
    section, model = case.artifact.kv_cache, case.artifact.model
    if section is None:
        return
    counts: Counter[str] = Counter()
    for layer in range(len(section.layers)):
        counts.update(section.heads(layer, model.num_kv_heads) or ())
    if all(isinstance(policy, Full) for policy in section.policies.values()):
        yield Finding(
            code="nothing-freed",
            severity="warning",
            where="kv_cache",
            message="every KV head keeps everything: the section frees no memory; remove it or name other policies",
        )
    elif counts.total() > 1 and len(counts) == 1:
        yield Finding(
            code="uniform-cache",
            severity="note",
            where="kv_cache.layers",
            message=f"all {counts.total():,} KV heads have {next(iter(counts))}: some heads look far back and lose "
            "most",
        )
    for name, policy in section.policies.items():
        tokens = _kept(policy)
        if isinstance(policy, Streaming) and policy.sinks == 0:
            yield Finding(
                code="no-sinks",
                severity="warning",
                where=f"kv_cache.policies.{name}",
                message="keeps no sinks: perplexity breaks down as soon as the first tokens leave the window; keep 4",
            )
        if tokens is not None and tokens >= model.max_positions:
            yield Finding(
                code="impossible-budget",
                severity="warning",
                where=f"kv_cache.policies.{name}",
                message=f"keeps {tokens:,} tokens, the model takes {model.max_positions:,}: nothing is ever evicted",
            )
    slides = [layer for layer, row in enumerate(section.layers) if row is None]
    if case.named and (odd := [layer for layer in slides if case.artifact.prefill.layers[layer] is not None]):
        yield Finding(
            code="sliding-layers",
            severity="warning",
            where="kv_cache.layers",
            message=f"layer{'s' * (len(odd) > 1)} {some(odd)} slides according to kv_cache but has patterns in "
            "prefill: one of the two is for another model",
        )


def _kept(policy: object) -> int | None:
    if isinstance(policy, Streaming):
        return policy.sinks + policy.window
    if isinstance(policy, H2O) and isinstance(policy.heavy, int) and isinstance(policy.recent, int):
        return policy.heavy + policy.recent
    return None
