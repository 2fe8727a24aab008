"""Says what is odd about an artifact that is whole: what an expert would ask about before serving with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from artifacts.lint import patterns, scores, sections
from artifacts.lint.rules import RULES, SEVERITIES, Case, Finding, Severity

__all__ = ["CHECKS", "RULES", "SEVERITIES", "Case", "Finding", "Severity", "lint"]

CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (*patterns.CHECKS, *scores.CHECKS, *sections.CHECKS)


def lint(case: Case) -> list[Finding]:
    """All findings, errors first."""
    found = [finding for check in CHECKS for finding in check(case)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
