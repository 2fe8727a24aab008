"""Checks of sizes that go with the length, and of the front."""

from __future__ import annotations

from collections.abc import Iterator

from artifacts.front import FRONT_ROWS, served_point
from artifacts.lint.finding import Case, Finding


def growth(case: Case) -> Iterator[Finding]:
    """Powers that cannot have been fitted, as there were no two lengths to fit them to."""
    found, search = case.artifact.prefill.growth, case.artifact.search
    if found is None or not any(power for powers in found.powers.values() for power in powers.values()):
        return
    lengths = () if search is None else search.calibration.lengths
    if len(set(lengths)) < 2:
        seen = f"the search saw {lengths[0]:,} tokens only" if lengths else "no search saw any length"
        yield Finding(
            code="unfitted-growth",
            severity="warning",
            where="prefill.growth.powers",
            message=f"sizes go with powers of the length, but {seen}: they are guessed; search on several lengths, or "
            "measure at others with python -m profiling.fidelity",
        )


def front(case: Case) -> Iterator[Finding]:
    """Points for prompts that are served densely or were searched on, and rows that are no point."""
    found, below = case.artifact.prefill.front, case.artifact.prefill.dense_below
    if found is None:
        return
    if found.length < below:
        yield Finding(
            code="front-below",
            severity="warning",
            where="prefill.front.length",
            message=f"the points' figures are for {found.length:,} tokens, but prompts below {below:,} are served "
            "densely: no target holds where the patterns are used; search on longer prompts",
        )
    if found.measured_on == "calibration":
        yield Finding(
            code="in-sample-front",
            severity="note",
            where="prefill.front.measured_on",
            message="kl and recall of the points are from prompts that the search chose them by: others lose more; "
            "measure with python -m profiling.compare before relying on a target",
        )
    if FRONT_ROWS in (case.arrays or {}) and served_point(case.artifact, case.arrays) is None:
        yield Finding(
            code="off-front",
            severity="note",
            where="prefill.layers",
            message="is none of the front's points: what is served where no target is given has no figures there",
        )
