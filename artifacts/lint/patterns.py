"""Checks of the patterns and of which head has which."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from artifacts.density import densities, density
from artifacts.growth import grown
from artifacts.lint.finding import Case, Finding, heads, some
from artifacts.patterns import TILE, AnyPattern, AShape, BlockSparse, Dilated, MemoryUnits, VerticalSlash, pattern_name

# Sparse kernels cost more a tile than dense ones: from this share on nothing is left to win.
NEAR_DENSE = 0.95
_SHORTEST = 1024


def uniform(case: Case) -> Iterator[Finding]:
    """All heads have one pattern, or one kind of pattern, or none is sparse."""
    artifact = case.artifact
    counts = Counter(name for row in artifact.prefill.layers for name in row or ())
    kinds = Counter(artifact.patterns[name].kind for name in counts.elements())
    if not counts:
        if artifact.decode is None and artifact.kv_cache is None:
            yield Finding(
                code="nothing-sparse",
                severity="warning",
                where="prefill.layers",
                message="no layer has patterns and there is no other section: applying the artifact changes nothing",
            )
    elif kinds.keys() == {"dense"}:
        yield Finding(
            code="nothing-sparse",
            severity="warning",
            where="prefill.layers",
            message="every head is dense: prefill gains nothing; search with a smaller budget or longer prompts",
        )
    elif len(counts) == 1 and case.named > 1:
        name = next(iter(counts))
        yield Finding(
            code="uniform",
            severity="warning",
            where="prefill.layers",
            message=f"all {heads(case.named)} have {name}: heads differ, and a search head by head would keep more "
            "for the same cost; was this written by hand?",
        )
    elif len(kinds) == 1:
        kind = next(iter(kinds))
        yield Finding(
            code="one-kind",
            severity="note",
            where="prefill.layers",
            message=f"all {heads(case.named)} are {kind}, in {len(counts)} sizes: other kinds were not tried or "
            "never won; a search with more kinds may keep more",
        )


def near_dense(case: Case) -> Iterator[Finding]:
    """Patterns that compute as much as dense attention, at lengths that are served with them."""
    below = case.artifact.prefill.dense_below
    asked = {"as searched": case.searched(), "as asked": case.length, "the shortest served": max(below, _SHORTEST)}
    done: set[int] = set()
    for why, length in asked.items():
        if length is None or length in done or length < below:
            continue
        done.add(length)
        known = _as_dense(case, length)
        if not known:
            continue
        name, most = known.most_common(1)[0]
        count = known.total()
        yield Finding(
            code="near-dense",
            severity="error" if why == "as searched" and count == case.named else "warning",
            where="prefill.dense_below" if why == "the shortest served" else "patterns",
            message=f"{heads(count)} of {case.named:,} compute {NEAR_DENSE:.0%} of dense attention or more at "
            f"{length:,} tokens ({why}; {name} on {heads(most)}): sparse kernels win nothing there; "
            f"{_remedy(case, length)}",
        )


def _as_dense(case: Case, length: int) -> Counter[str]:
    """How many heads of each sparse pattern compute about as much as dense attention at a length."""
    rows = zip(case.artifact.prefill.layers, densities(case.artifact, length, case.arrays), strict=True)
    return Counter(
        name
        for names, shares in rows
        for name, share in zip(names or (), shares or (), strict=True)
        if share is not None and share >= NEAR_DENSE and case.artifact.patterns[name].kind != "dense"
    )


def _remedy(case: Case, length: int) -> str:
    while length < case.artifact.model.max_positions:
        length *= 2
        if (left := _as_dense(case, length).total()) * 10 <= case.named:
            return f"take smaller sizes or raise dense_below to {length:,}, where {heads(left)} still do"
    return "take smaller sizes: at any length that the model serves more than a tenth of the heads are like that"


def sizes(case: Case) -> Iterator[Finding]:
    """Sizes that no prompt can fill, or that two patterns share; names that say others."""
    artifact = case.artifact
    most = artifact.model.max_positions
    effective: dict[AnyPattern, str] = {}
    called: defaultdict[str, set[AnyPattern]] = defaultdict(set)
    for pattern in artifact.patterns.values():
        called[pattern_name(pattern)].add(pattern)
    for name, pattern in artifact.patterns.items():
        where = f"patterns.{name}"
        largest = grown(pattern, artifact.prefill.growth, most)
        tokens = {field: value for field, value in largest if field in ("sink", "window", "vertical", "slash", "last")}
        if isinstance(largest, BlockSparse):
            tokens["blocks"] = largest.blocks * TILE
        if isinstance(largest, MemoryUnits):
            tokens["units"] = largest.units * TILE
        if large := [field for field, value in tokens.items() if value > most]:
            yield Finding(
                code="beyond-model",
                severity="warning",
                where=where,
                message=f"{large[0]} covers {tokens[large[0]]:,} tokens, the model takes {most:,}: the pattern is "
                "dense on that side; is the artifact for a model of longer context?",
            )
        rounded = _at_least_a_tile(pattern)
        if rounded in effective:
            yield Finding(
                code="twins",
                severity="note",
                where=where,
                message=f"computes the same as {effective[rounded]}: one name would do",
            )
        effective.setdefault(rounded, name)
        if called.get(name, set()) - {pattern}:
            yield Finding(
                code="misnamed",
                severity="warning",
                where=where,
                message=f"is called as {name} would be, but is {pattern_name(pattern)}: rename it",
            )


def small(case: Case) -> Iterator[Finding]:
    """Sizes below a tile, which count as one."""
    artifact = case.artifact
    names = [name for name, pattern in artifact.patterns.items() if _at_least_a_tile(pattern) != pattern]
    if names:
        among = set(names)
        count = sum(name in among for row in artifact.prefill.layers for name in row or ())
        yield Finding(
            code="below-tile",
            severity="note",
            where="patterns",
            message=f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}, on {heads(count)}: sizes below "
            f"{TILE} count as {TILE}, because the first {TILE} columns and nearest {TILE} diagonals are always "
            "computed",
        )


def _at_least_a_tile(pattern: AnyPattern) -> AnyPattern:
    if isinstance(pattern, VerticalSlash):
        update = {"vertical": max(pattern.vertical, TILE), "slash": max(pattern.slash, TILE)}
        return pattern.model_copy(update=update)
    return pattern


def question(case: Case) -> Iterator[Finding]:
    """Layers in which no head lets the prompt's last queries see its middle."""
    artifact = case.artifact
    if artifact.prefill.dense_tail:
        return
    blind = [
        layer
        for layer, row in enumerate(artifact.prefill.layers)
        if row and all(isinstance(artifact.patterns[name], AShape | Dilated) for name in row)
    ]
    if blind:
        yield Finding(
            code="no-tail",
            severity="warning",
            where="prefill.dense_tail",
            message=f"dense_tail is 0 and in layer{'s' * (len(blind) > 1)} {some(blind)} every head sees sinks and a "
            "window alone: a question at the end finds nothing in the middle; set dense_tail to 64",
        )


def budget(case: Case) -> Iterator[Finding]:
    """Budgets that cannot be met, were not met, or ask for nothing."""
    search, tail = case.artifact.search, case.artifact.prefill.dense_tail
    if search is None:
        return
    length = min(search.calibration.lengths)
    least = _least(length, tail)
    target, found = search.target_density, search.summary.density
    if target < least:
        yield Finding(
            code="impossible-budget",
            severity="error",
            where="search.target_density",
            message=f"asks for {target:.4f} of dense attention, but a query's own tile, the first one and the dense "
            f"tail of {tail} come to {least:.4f} at {length:,} tokens: no pattern can meet it; search with a larger "
            "budget or on longer prompts",
        )
    elif found > target * 1.05 + 0.01:
        yield Finding(
            code="over-budget",
            severity="warning",
            where="search.summary.density",
            message=f"the patterns compute {found:.4f}, the budget was {target:.4f}: they are slower than asked; "
            "search again",
        )
    if target >= NEAR_DENSE:
        yield Finding(
            code="dense-budget",
            severity="warning",
            where="search.target_density",
            message=f"allows {target:.4f} of dense attention: nothing is won; search with a smaller budget",
        )


def _least(length: int, tail: int) -> float:
    return density(BlockSparse(blocks=1), length, dense_tail=tail) or 0.0
