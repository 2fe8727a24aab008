"""Lint: rules that an expert would apply to a whole artifact before serving with it."""

from __future__ import annotations

from collections.abc import Callable

from artifacts.analysis import lint_heads
from artifacts.analysis.findings import (
    SEVERITIES,
    Case,
    Finding,
    Findings,
    layer_list,
    note,
    warning,
)
from artifacts.schema.kv_cache import H2O, Full, Streaming


def lint(case: Case) -> list[Finding]:
    """All findings, errors first."""
    findings = [finding for check in CHECKS for finding in check(case)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def origin(case: Case) -> Findings:
    """Patterns of no search, of a single prompt, or of other lengths than are served."""
    artifact = case.artifact
    search = case.artifact.search
    imported = case.artifact.prefill.imported
    if artifact.model.weights_sha256 is None:
        yield warning(
            "no-fingerprint",
            "model.weights_sha256",
            "is open: the artifact is applied to any model of this shape without a word",
        )
    if search is None:
        if imported is not None:
            yield warning(
                "unsearched",
                "search",
                f"the patterns were taken over from {imported.file}: no prompts, lengths or seed "
                "say on what they hold; measure them, or search",
            )
        return
    lengths = search.calibration.lengths
    samples = search.calibration.samples
    longest = max(lengths)
    below = artifact.prefill.dense_below
    most = artifact.model.max_positions
    if longest < below:
        yield warning(
            "searched-below",
            "prefill.dense_below",
            f"prompts below {below:,} tokens are served densely, but the search saw none above "
            f"{longest:,}: the patterns are used on no length that they were chosen for; search on "
            "longer prompts",
        )
    if len(search.calibration.tasks) * len(lengths) * samples == 1:
        yield note(
            "one-prompt",
            "search.calibration",
            f"was searched on a single prompt of {longest:,} tokens: chance decides between near "
            "candidates; search without --preset paper and with --samples 3 or more",
        )
    if most >= 4 * longest:
        yield note(
            "short-search",
            "search.calibration.lengths",
            f"was searched on prompts of up to {longest:,} tokens, the model takes {most:,}: "
            "nothing is known of the patterns there; evaluate at such lengths",
        )


def history(case: Case) -> Findings:
    """Fields that were set by hand after the search, and nothing measured."""
    edits = case.artifact.edits
    if edits:
        last = edits[-1]
        if len(edits) > 1:
            more = f" and {len(edits) - 1} more"
        else:
            more = ""
        yield note(
            "edited",
            "edits",
            f"{last.field} was set from {last.before} to {last.after}{more}: search and evidence "
            "are of the artifact before; measure again what matters",
        )
    if not case.artifact.evidence:
        yield warning(
            "no-evidence",
            "evidence",
            "nothing was measured with it: whether it is faster, and still right, nobody knows; "
            "run headwise evaluate --attach",
        )
    front = case.artifact.prefill.front
    below = case.artifact.prefill.dense_below
    if front is not None and front.length < below:
        yield warning(
            "front-below",
            "prefill.front.length",
            f"the points' figures are for {front.length:,} tokens, but prompts below {below:,} are "
            "served densely: no target holds where the patterns are used; search on longer prompts",
        )


def decode(case: Case) -> Findings:
    """Filter layers that serve nobody, and budgets that leave nothing out."""
    section = case.artifact.decode
    model = case.artifact.model
    if section is None:
        return
    omnikv = section.omnikv
    where = "decode.omnikv"
    full = {*omnikv.filter_layers, *omnikv.dense_layers, *range(omnikv.filter_layers[0])}
    if len(full) >= model.num_layers:
        yield warning(
            "no-sparse-layer",
            where,
            "every layer filters or is dense: decode attends to everything and chooses for nobody; "
            "name fewer filter layers",
        )
    if isinstance(omnikv.budget, int) and omnikv.budget >= model.max_positions:
        yield _impossible(f"{where}.budget", omnikv.budget, model.max_positions)


def kv_cache(case: Case) -> Findings:
    """Policies that free nothing, keep no sinks, or can never evict."""
    section = case.artifact.kv_cache
    most = case.artifact.model.max_positions
    if section is None:
        return
    if all(isinstance(policy, Full) for policy in section.policies.values()):
        keeps = (
            "every KV head keeps everything: the section frees no memory; "
            "remove it or name other policies"
        )
        yield warning("nothing-freed", "kv_cache", keeps)
    for name, policy in section.policies.items():
        where = f"kv_cache.policies.{name}"
        tokens = _kept(policy)
        if isinstance(policy, Streaming) and policy.sinks == 0:
            breaks = (
                "keeps no sinks: perplexity breaks down as soon as the first "
                "tokens leave the window; keep 4"
            )
            yield warning("no-sinks", where, breaks)
        if tokens is not None and tokens >= most:
            yield _impossible(where, tokens, most)
    rows = zip(section.layers, case.artifact.prefill.layers, strict=True)
    unlike = [
        i
        for i, (policies, patterns) in enumerate(rows)
        if policies is None and patterns is not None
    ]
    if unlike:
        yield warning(
            "sliding-layers",
            "kv_cache.layers",
            f"{layer_list(unlike)} slides according to kv_cache but has patterns in prefill: one "
            "of the two is for another model",
        )


def _impossible(where: str, tokens: int, most: int) -> Finding:
    keeps = f"keeps {tokens:,} tokens, the model takes {most:,}: nothing is ever left out"
    return warning("impossible-budget", where, keeps)


def _kept(policy: object) -> int | None:
    if isinstance(policy, Streaming):
        return policy.sinks + policy.window
    if isinstance(policy, H2O) and isinstance(policy.heavy, int) and isinstance(policy.recent, int):
        return policy.heavy + policy.recent
    return None


# In the order in which findings of one severity are listed.
CHECKS: tuple[Callable[[Case], Findings], ...] = (
    lint_heads.uniform,
    lint_heads.near_dense,
    lint_heads.sizes,
    lint_heads.question,
    lint_heads.growth,
    lint_heads.shapes,
    lint_heads.gaps,
    lint_heads.summary,
    lint_heads.low_recall,
    lint_heads.imports,
    origin,
    history,
    decode,
    kv_cache,
)
