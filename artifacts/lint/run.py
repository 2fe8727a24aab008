"""Runs the checks of an artifact in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from artifacts.lint import front, imports, patterns, scores, sections
from artifacts.lint.finding import SEVERITIES, Case, Finding

CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    patterns.uniform,
    patterns.near_dense,
    patterns.sizes,
    patterns.small,
    patterns.question,
    patterns.budget,
    front.growth,
    front.front,
    scores.sidecar,
    scores.shapes,
    scores.ranges,
    scores.summary,
    scores.low_recall,
    imports.scales,
    imports.precision,
    sections.origin,
    sections.edits,
    sections.evidence,
    sections.decode,
    sections.kv_cache,
)


def lint(case: Case) -> list[Finding]:
    """All findings, errors first."""
    found = [finding for check in CHECKS for finding in check(case)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
