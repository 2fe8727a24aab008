"""Checks of the patterns, of which head has which, and of how sizes go with the length."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from artifacts.density import densities, density
from artifacts.errors import plural
from artifacts.growth import grown
from artifacts.lint.rules import Case, Finding, layers, odd
from artifacts.patterns import TILE, AnyPattern, AShape, BlockSparse, Dilated, MemoryUnits, VerticalSlash, pattern_name

# Sparse kernels cost more a tile than dense ones: from this share on nothing is left to win.
NEAR_DENSE = 0.95
_SHORTEST = 1024


def uniform(case: Case) -> Iterator[Finding]:
    """All heads have one pattern, or one kind of pattern, or none is sparse."""
    artifact, where = case.artifact, "prefill.layers"
    counts = Counter(name for row in artifact.prefill.layers for name in row or ())
    kinds = {artifact.patterns[name].kind for name in counts}
    heads = plural(case.named, "head")
    if not counts:
        if artifact.decode is None and artifact.kv_cache is None:
            yield odd("nothing-sparse", where)
    elif kinds == {"dense"}:
        yield odd("nothing-sparse:dense", where)
    elif len(counts) == 1 and case.named > 1:
        yield odd("uniform", where, heads=heads, name=next(iter(counts)))
    elif len(kinds) == 1:
        yield odd("one-kind", where, heads=heads, kind=next(iter(kinds)), sizes=len(counts))


def near_dense(case: Case) -> Iterator[Finding]:
    """Patterns that compute as much as dense attention, at lengths that are served with them."""
    search, below = case.artifact.search, case.artifact.prefill.dense_below
    asked = {
        "as searched": None if search is None else max(search.calibration.lengths),
        "as asked": case.length,
        "the shortest served": max(below, _SHORTEST),
    }
    done: set[int] = set()
    for why, length in asked.items():
        if length is None or length in done or length < below:
            continue
        done.add(length)
        if known := _as_dense(case, length):
            name, most = known.most_common(1)[0]
            yield odd(
                "near-dense:all" if why == "as searched" and known.total() == case.named else "near-dense",
                "prefill.dense_below" if why == "the shortest served" else "patterns",
                **{"heads": plural(known.total(), "head"), "all": case.named, "share": NEAR_DENSE, "length": length},
                **{"why": why, "name": name, "most": plural(most, "head"), "remedy": _remedy(case, length)},
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
            return f"take smaller sizes or raise dense_below to {length:,}, where {plural(left, 'head')} still do"
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
            yield odd("beyond-model", where, field=large[0], tokens=tokens[large[0]], most=most)
        rounded = _at_least_a_tile(pattern)
        if rounded in effective:
            yield odd("twins", where, other=effective[rounded])
        effective.setdefault(rounded, name)
        if called.get(name, set()) - {pattern}:
            yield odd("misnamed", where, name=name, is_=pattern_name(pattern))


def small(case: Case) -> Iterator[Finding]:
    """Sizes below a tile, which count as one."""
    artifact = case.artifact
    names = {name for name, pattern in artifact.patterns.items() if _at_least_a_tile(pattern) != pattern}
    if names:
        heads = plural(sum(name in names for row in artifact.prefill.layers for name in row or ()), "head")
        said = f"{min(names)}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        yield odd("below-tile", "patterns", names=said, heads=heads, tile=TILE)


def _at_least_a_tile(pattern: AnyPattern) -> AnyPattern:
    if isinstance(pattern, VerticalSlash):
        update = {"vertical": max(pattern.vertical, TILE), "slash": max(pattern.slash, TILE)}
        return pattern.model_copy(update=update)
    return pattern


def question(case: Case) -> Iterator[Finding]:
    """Layers in which no head lets the prompt's last queries see its middle."""
    patterns, prefill = case.artifact.patterns, case.artifact.prefill
    rows = enumerate(() if prefill.dense_tail else prefill.layers)
    blind = [i for i, row in rows if row and all(isinstance(patterns[name], AShape | Dilated) for name in row)]
    if blind:
        yield odd("no-tail", "prefill.dense_tail", layers=layers(blind))


def budget(case: Case) -> Iterator[Finding]:
    """Budgets that cannot be met, were not met, or ask for nothing."""
    search, tail = case.artifact.search, case.artifact.prefill.dense_tail
    if search is None:
        return
    length, target, found = min(search.calibration.lengths), search.target_density, search.summary.density
    least = density(BlockSparse(blocks=1), length, dense_tail=tail) or 0.0
    where = "search.target_density"
    if target < least:
        yield odd("impossible-budget:search", where, target=target, tail=tail, least=least, length=length)
    elif found > target * 1.05 + 0.01:
        yield odd("over-budget", "search.summary.density", found=found, target=target)
    if target >= NEAR_DENSE:
        yield odd("dense-budget", where, target=target)


def growth(case: Case) -> Iterator[Finding]:
    """Powers that cannot have been fitted, as there were no two lengths to fit them to."""
    found, search = case.artifact.prefill.growth, case.artifact.search
    if found is None or not any(power for powers in found.powers.values() for power in powers.values()):
        return
    lengths = () if search is None else search.calibration.lengths
    if len(set(lengths)) < 2:
        seen = f"the search saw {lengths[0]:,} tokens only" if lengths else "no search saw any length"
        yield odd("unfitted-growth", "prefill.growth.powers", seen=seen)


CHECKS = (uniform, near_dense, sizes, small, question, budget, growth)
