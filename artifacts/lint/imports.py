"""Checks of the scores that an import brought along: what they are, and whether they can be compared."""

from __future__ import annotations

from collections.abc import Iterator

from artifacts.lint.finding import Case, Finding, heads
from artifacts.lint.scores import ONE, tables


def scales(case: Case) -> Iterator[Finding]:
    """Imported scores that are no recalls, or of two scales."""
    imported = case.artifact.prefill.imported
    table = tables(case).get("imported.score")
    if imported is None:
        return
    values = [] if table is None else [value for row in table.tolist() for value in row if value == value]
    shares = [value for value in values if 0 < value < 1]
    larger = [value for value in values if value > ONE]
    if imported.scores is None or not values:
        yield Finding(
            code="no-scores",
            severity="warning",
            where="prefill.imported.scores",
            message="the imported file has no scores: nobody can say how good its patterns are; measure them with "
            "python -m profiling.fidelity",
        )
    elif shares and larger:
        yield Finding(
            code="mixed-scales",
            severity="warning",
            where="imported.score",
            message=f"{heads(len(shares))} have scores between 0 and 1 and {heads(len(larger))} up to "
            f"{max(larger):,.6g}: two scales in one file, no mean means anything; was the file put together of two "
            "searches?",
        )
    elif larger:
        yield Finding(
            code="foreign-scores",
            severity="warning",
            where="imported.score",
            message=f"scores run from {_number(min(values))} to {_number(max(values))}: no recalls, most likely how "
            "many elements of the output were off (less is better), and not to be compared between heads of other "
            "sizes; measure recall with python -m profiling.fidelity",
        )
    elif max(values) > 1:
        over = sum(value > 1 for value in values)
        yield Finding(
            code="score-above-one",
            severity="note",
            where="imported.score",
            message=f"{heads(over)} have recalls above 1 (up to {max(values):.6f}): a rounding error of low "
            "precision, and others have it too; read the last digits with care",
        )
    if len(values) > 1 and len(set(values)) == 1 and any(values):
        yield Finding(
            code="constant-scores",
            severity="warning",
            where="imported.score",
            message=f"every head has the score {values[0]:.6g}: made up or left at a default; measure with "
            "python -m profiling.fidelity",
        )


def precision(case: Case) -> Iterator[Finding]:
    """Imported recalls of some patterns in half precision beside those of others in full."""
    imported, table = case.artifact.prefill.imported, tables(case).get("imported.score")
    if imported is None or imported.scores != "recall" or table is None:
        return
    by_pattern: dict[str, list[float]] = {}
    for row, values in zip(case.artifact.prefill.layers, table.tolist(), strict=True):
        for name, value in zip(row or (), values, strict=False):
            by_pattern.setdefault(name, []).append(value)
    # bfloat16 steps by 1/256 from a half on, and by 1/512 below.
    coarse = [name for name, values in by_pattern.items() if all(value * 512 % 1 == 0 for value in values)]
    coarse = [name for name in coarse if len(by_pattern[name]) > 1]
    if coarse and len(coarse) < len(by_pattern):
        count = sum(len(by_pattern[name]) for name in coarse)
        yield Finding(
            code="mixed-precision",
            severity="warning",
            where="imported.score",
            message=f"the recalls of {', '.join(coarse[:3])} ({heads(count)}) are multiples of 1/512, those of other "
            "patterns are not: they were measured in half precision beside full, and won or lost by their rounding; "
            "measure recall with python -m profiling.fidelity",
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
