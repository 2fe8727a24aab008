"""Lint's rules on the heads' patterns: sizes, density, and the scores in the sidecar."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from artifacts.analysis.density import densities
from artifacts.analysis.findings import Case, Findings, error, layer_list, warning
from artifacts.errors import number, plural
from artifacts.schema.growth import grown
from artifacts.schema.patterns import AnyPattern, pattern_name

# Sparse kernels cost more a tile than dense ones: from this density on nothing is left to win.
NEAR_DENSE = 0.95
LOW_RECALL = 0.5
# float32 means of shares end up a rounding error above 1.
ONE = 1.0001
_SHORTEST = 1024
_PER_HEAD = ("chosen.", "candidates.", "imported.score")
_PER_KV_HEAD = ("imported.full_attention",)


def uniform(case: Case) -> Findings:
    """All heads have one pattern, or none is sparse."""
    artifact = case.artifact
    where = "prefill.layers"
    names = {name for row in artifact.prefill.layers for name in row or ()}
    if not names and artifact.decode is None and artifact.kv_cache is None:
        nothing = (
            "no layer has patterns and there is no other section: applying "
            "the artifact changes nothing"
        )
        yield warning("nothing-sparse", where, nothing)
    elif names and all(artifact.patterns[name].kind == "dense" for name in names):
        gains = (
            "every head is dense: prefill gains nothing; search with a "
            "smaller budget or longer prompts"
        )
        yield warning("nothing-sparse", where, gains)
    elif len(names) == 1 and case.named > 1:
        (name,) = names
        yield warning(
            "uniform",
            where,
            f"all {plural(case.named, 'head')} have {name}: heads differ, and a search head by "
            "head would keep more for the same cost; was this written by hand?",
        )


def near_dense(case: Case) -> Findings:
    """Patterns that compute as much as dense attention, at lengths that are served with them."""
    search = case.artifact.search
    below = case.artifact.prefill.dense_below
    lengths = {max(below, _SHORTEST): "the shortest served"}
    if search is not None and max(search.calibration.lengths) >= below:
        lengths[max(search.calibration.lengths)] = "as searched"
    for length, why in lengths.items():
        heads = _as_dense(case, length)
        if not heads:
            continue
        name, most = heads.most_common(1)[0]
        message = (
            f"{plural(heads.total(), 'head')} of {case.named:,} compute {NEAR_DENSE:.0%} of dense "
            f"attention or more at {length:,} tokens ({why}; {name} on {plural(most, 'head')}): "
            f"sparse kernels win nothing there; {_remedy(case, length)}"
        )
        if why == "as searched" and heads.total() == case.named:
            yield error("near-dense", "patterns", message)
        else:
            yield warning("near-dense", "patterns", message)


def _as_dense(case: Case, length: int) -> Counter[str]:
    """Heads of each sparse pattern that compute about as much as dense attention at a length."""
    rows = zip(case.artifact.prefill.layers, densities(case.artifact, length), strict=True)
    return Counter(
        name
        for names, shares in rows
        for name, share in zip(names or (), shares or (), strict=True)
        if share is not None
        and share >= NEAR_DENSE
        and case.artifact.patterns[name].kind != "dense"
    )


def _remedy(case: Case, length: int) -> str:
    while length < case.artifact.model.max_positions:
        length *= 2
        left = _as_dense(case, length).total()
        if left * 10 <= case.named:
            return (
                f"take smaller sizes or raise dense_below to {length:,}, where "
                f"{plural(left, 'head')} still do"
            )
    return (
        "take smaller sizes: at any length that the model serves more than a "
        "tenth of the heads are like that"
    )


def sizes(case: Case) -> Findings:
    """Sizes that no prompt can fill; names that say others."""
    artifact = case.artifact
    most = artifact.model.max_positions
    called: defaultdict[str, set[AnyPattern]] = defaultdict(set)
    for pattern in artifact.patterns.values():
        called[pattern_name(pattern)].add(pattern)
    for name, pattern in artifact.patterns.items():
        where = f"patterns.{name}"
        largest = grown(pattern, artifact.prefill.growth, most)
        tokens = {
            field: getattr(largest, field) * covered for field, covered in pattern.covers.items()
        }
        large = [field for field, value in tokens.items() if value > most]
        if large:
            yield warning(
                "beyond-model",
                where,
                f"{large[0]} covers {tokens[large[0]]:,} tokens, the model takes {most:,}: the "
                "pattern is dense on that side; is the artifact for a model of longer context?",
            )
        if called.get(name, set()) - {pattern}:
            says = f"is called as {name} would be, but is {pattern_name(pattern)}: rename it"
            yield warning("misnamed", where, says)


def question(case: Case) -> Findings:
    """Layers in which no head lets the prompt's last queries see its middle."""
    prefill = case.artifact.prefill
    if prefill.dense_tail:
        return
    blind = []
    for layer, row in enumerate(prefill.layers):
        if row and all(case.artifact.patterns[name].local for name in row):
            blind.append(layer)
    if blind:
        yield warning(
            "no-tail",
            "prefill.dense_tail",
            f"dense_tail is 0 and in {layer_list(blind)} every head sees sinks and a window alone: "
            "a question at the end finds nothing in the middle; set dense_tail to 64",
        )


def growth(case: Case) -> Findings:
    """Powers that cannot have been fitted, as there were no two lengths to fit them to."""
    section = case.artifact.prefill.growth
    search = case.artifact.search
    if section is None or not any(
        power for powers in section.powers.values() for power in powers.values()
    ):
        return
    seen = "no search saw any length"
    lengths: set[int] = set()
    if search is not None:
        lengths = set(search.calibration.lengths)
        seen = f"the search saw {search.calibration.lengths[0]:,} tokens only"
    if len(lengths) < 2:
        yield warning(
            "unfitted-growth",
            "prefill.growth.powers",
            f"sizes go with powers of the length, but {seen}: they are guessed; search on several "
            "lengths, or evaluate at others",
        )


def shapes(case: Case) -> Findings:
    """Arrays with another number of layers or heads than the model's."""
    model = case.artifact.model
    for name, array in sorted(case.entries.items()):
        if name in _PER_KV_HEAD:
            heads = model.num_kv_heads
        else:
            heads = model.num_heads
        if name.startswith((*_PER_HEAD, *_PER_KV_HEAD)) and array.shape[:2] != (
            model.num_layers,
            heads,
        ):
            yield error(
                "head-counts",
                name,
                f"has the shape {tuple(array.shape)}, the model has {model.num_layers} layers of "
                f"{heads} heads: the sidecar is of another model; search again",
            )
            return


def gaps(case: Case) -> Findings:
    """Scores where there is no pattern and none where there is one."""
    for name, array in sorted(case.tables.items()):
        if not name.startswith("chosen.") or name.rpartition(".")[2] not in (
            "recall",
            "density",
            "error",
        ):
            continue
        rows = zip(array.tolist(), case.artifact.prefill.layers, strict=True)
        scored = [
            (any(value == value for value in values), row is not None) for values, row in rows
        ]
        wrong = [i for i, (score, pattern) in enumerate(scored) if score != pattern]
        if wrong:
            yield error(
                "score-gap",
                name,
                f"{layer_list(wrong)}: has scores without patterns or patterns without scores: "
                "YAML and sidecar are of two searches; search again",
            )


def summary(case: Case) -> Findings:
    """A summary that does not say what the rows say."""
    artifact = case.artifact
    search = case.artifact.search
    if search is None:
        return
    won = Counter(
        str(artifact.patterns[name].kind) for row in artifact.prefill.layers for name in row or ()
    )
    stated = {kind: count for kind, count in search.summary.winners.items() if count}
    if stated != dict(won):
        yield error(
            "stale-summary",
            "search.summary.winners",
            f"says {_counts(stated)}, the rows have {_counts(won)}: rows were changed after the "
            "search, and its scores are not theirs; search again",
        )


def low_recall(case: Case) -> Findings:
    """Heads whose sparse pattern keeps less than half of their attention."""
    artifact = case.artifact
    imported = case.artifact.prefill.imported
    there = "chosen.recall" in case.arrays or imported is None or imported.scores != "recall"
    if there:
        name = "chosen.recall"
    else:
        name = "imported.score"
    table = case.tables.get(name)
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
        yield warning(
            "low-recall",
            name,
            f"{plural(low.total(), 'head')} keep less than {LOW_RECALL:.0%} of their attention "
            f"(down to {worst:.2f}; most in layer {low.most_common(1)[0][0]}, "
            f"{plural(len(low), 'layer')} in all): whatever the budget, these heads lose; give "
            "them dense or a larger pattern",
        )


def imports(case: Case) -> Findings:
    """Imported scores that are no recalls, of two scales, or of two precisions."""
    imported = case.artifact.prefill.imported
    where = "imported.score"
    table = case.tables.get(where)
    if imported is None or table is None:
        return
    values = [value for row in table.tolist() for value in row if value == value]
    shares = [value for value in values if 0 < value < 1]
    larger = [value for value in values if value > ONE]
    if shares and larger:
        yield warning(
            "mixed-scales",
            where,
            f"{plural(len(shares), 'head')} have scores between 0 and 1 and "
            f"{plural(len(larger), 'head')} up to {max(larger):,.6g}: two scales in one file, no "
            "mean means anything; was the file put together of two searches?",
        )
    elif larger:
        yield warning(
            "foreign-scores",
            where,
            f"scores run from {number(min(values))} to {number(max(values))}: no recalls, most "
            "likely how many elements of the output were off (less is better), and not to be "
            "compared between heads of other sizes",
        )
    if imported.scores != "recall":
        return
    by_pattern: dict[str, list[float]] = {}
    for row, scores in zip(case.artifact.prefill.layers, table.tolist(), strict=True):
        for name, value in zip(row or (), scores, strict=False):
            by_pattern.setdefault(name, []).append(value)
    # bfloat16 steps by 1/256 from a half on, and by 1/512 below.
    coarse = [
        name
        for name, own in by_pattern.items()
        if len(own) > 1 and all(value * 512 % 1 == 0 for value in own)
    ]
    if coarse and len(coarse) < len(by_pattern):
        yield warning(
            "mixed-precision",
            where,
            f"the recalls of {', '.join(coarse[:3])} "
            f"({plural(sum(len(by_pattern[name]) for name in coarse), 'head')}) are multiples of "
            "1/512, those of other patterns are not: they were measured in half precision and "
            "the others in full, and won or lost by their rounding",
        )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts)) or "none"
