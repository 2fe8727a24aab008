"""Lint: rules that an expert would apply to a whole artifact before serving with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from artifacts.analysis.density import densities
from artifacts.errors import number, plural
from artifacts.schema.artifact import Artifact
from artifacts.schema.growth import grown
from artifacts.schema.kv_cache import H2O, Full, Streaming
from artifacts.schema.patterns import AnyPattern, pattern_name

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
# Sparse kernels cost more a tile than dense ones: from this share on nothing is left to win.
NEAR_DENSE = 0.95
LOW_RECALL = 0.5
# float32 means of shares end up a rounding error above 1.
ONE = 1.0001
_SHORTEST = 1024
_PER_HEAD = ("chosen.", "candidates.", "imported.score")
_PER_KV_HEAD = ("imported.full_attention",)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is odd.

    code: its rule, to be ignored by. severity: "error" is a contradiction or a loss on every
    prompt, "warning" most likely a mistake, "note" worth knowing. where: the field or array.
    message: what, why, what to do."""

    code: str
    severity: Severity
    where: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """An artifact and its sidecar's arrays."""

    artifact: Artifact
    arrays: Mapping[str, Array] = field(default_factory=dict)

    @property
    def named(self) -> int:
        """Heads that have a pattern."""
        return sum(len(row) for row in self.artifact.prefill.layers if row is not None)


Checked = Iterator[Finding]


def lint(case: Case) -> list[Finding]:
    """All findings, errors first."""
    findings = [finding for check in CHECKS for finding in check(case)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def error(code: str, where: str, message: str) -> Finding:
    """A contradiction, or a loss on every prompt."""
    return Finding(code=code, severity="error", where=where, message=message)


def warning(code: str, where: str, message: str) -> Finding:
    """Most likely a mistake."""
    return Finding(code=code, severity="warning", where=where, message=message)


def note(code: str, where: str, message: str) -> Finding:
    """Worth knowing."""
    return Finding(code=code, severity="note", where=where, message=message)


def uniform(case: Case) -> Checked:
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


def near_dense(case: Case) -> Checked:
    """Patterns that compute as much as dense attention, at lengths that are served with them."""
    search = case.artifact.search
    below = case.artifact.prefill.dense_below
    lengths = {max(below, _SHORTEST): "the shortest served"}
    if search is not None and max(search.calibration.lengths) >= below:
        lengths[max(search.calibration.lengths)] = "as searched"
    for length, why in lengths.items():
        known = _as_dense(case, length)
        if not known:
            continue
        name, most = known.most_common(1)[0]
        message = (
            f"{plural(known.total(), 'head')} of {case.named:,} compute {NEAR_DENSE:.0%} of dense "
            f"attention or more at {length:,} tokens ({why}; {name} on {plural(most, 'head')}): "
            f"sparse kernels win nothing there; {_remedy(case, length)}"
        )
        if why == "as searched" and known.total() == case.named:
            yield error("near-dense", "patterns", message)
        else:
            yield warning("near-dense", "patterns", message)


def _as_dense(case: Case, length: int) -> Counter[str]:
    """Heads of each sparse pattern that compute about as much as dense attention at a length."""
    rows = zip(
        case.artifact.prefill.layers, densities(case.artifact, length, case.arrays), strict=True
    )
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


def sizes(case: Case) -> Checked:
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


def question(case: Case) -> Checked:
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
            f"dense_tail is 0 and in {_layers(blind)} every head sees sinks and a window alone: a "
            "question at the end finds nothing in the middle; set dense_tail to 64",
        )


def growth(case: Case) -> Checked:
    """Powers that cannot have been fitted, as there were no two lengths to fit them to."""
    section = case.artifact.prefill.growth
    search = case.artifact.search
    if section is None or not any(
        power for powers in section.powers.values() for power in powers.values()
    ):
        return
    lengths = () if search is None else search.calibration.lengths
    if len(set(lengths)) < 2:
        seen = (
            f"the search saw {lengths[0]:,} tokens only" if lengths else "no search saw any length"
        )
        yield warning(
            "unfitted-growth",
            "prefill.growth.powers",
            f"sizes go with powers of the length, but {seen}: they are guessed; search on several "
            "lengths, or evaluate at others",
        )


def shapes(case: Case) -> Checked:
    """Arrays with another number of layers or heads than the model's."""
    model = case.artifact.model
    for name, array in sorted(_entries(case).items()):
        heads = model.num_kv_heads if name in _PER_KV_HEAD else model.num_heads
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


def gaps(case: Case) -> Checked:
    """Scores where there is no pattern and none where there is one."""
    for name, array in sorted(_tables(case).items()):
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
                f"{_layers(wrong)}: has scores without patterns or patterns without scores: YAML "
                "and sidecar are of two searches; search again",
            )


def summary(case: Case) -> Checked:
    """A summary that does not say what the rows say."""
    artifact = case.artifact
    search = case.artifact.search
    if search is None:
        return
    won = Counter(
        str(artifact.patterns[name].kind) for row in artifact.prefill.layers for name in row or ()
    )
    said = {kind: count for kind, count in search.summary.winners.items() if count}
    if said != dict(won):
        yield error(
            "stale-summary",
            "search.summary.winners",
            f"says {_counts(said)}, the rows have {_counts(won)}: rows were changed after the "
            "search, and its scores are not theirs; search again",
        )


def low_recall(case: Case) -> Checked:
    """Heads whose sparse pattern keeps less than half of their attention."""
    artifact = case.artifact
    imported = case.artifact.prefill.imported
    there = "chosen.recall" in case.arrays or imported is None or imported.scores != "recall"
    name = "chosen.recall" if there else "imported.score"
    table = _tables(case).get(name)
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


def imports(case: Case) -> Checked:
    """Imported scores that are no recalls, of two scales, or of two precisions."""
    imported = case.artifact.prefill.imported
    where = "imported.score"
    table = _tables(case).get(where)
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
            "1/512, those of other patterns are not: they were measured in half precision beside "
            "full, and won or lost by their rounding",
        )


def origin(case: Case) -> Checked:
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
    if len(lengths) * samples == 1:
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


def history(case: Case) -> Checked:
    """Fields that were set by hand after the search, and nothing measured."""
    edits = case.artifact.edits
    if edits:
        last = edits[-1]
        more = f" and {len(edits) - 1} more" if len(edits) > 1 else ""
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


def decode(case: Case) -> Checked:
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


def kv_cache(case: Case) -> Checked:
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
            f"{_layers(unlike)} slides according to kv_cache but has patterns in prefill: one of "
            "the two is for another model",
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


def _layers(numbers: list[int], limit: int = 5) -> str:
    """layer 3, layers 1, 2, 3, or layers 1, 2, 3, 4, 5 and 7 more."""
    shown = ", ".join(map(str, numbers[:limit]))
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return f"layer{'s' * (len(numbers) > 1)} {shown}{more}"


def _entries(case: Case) -> Mapping[str, Any]:
    """Dtypes and shapes by the sidecar's header, which reads no array; or the arrays themselves."""
    return getattr(case.arrays, "entries", case.arrays)


def _tables(case: Case) -> dict[str, Array]:
    """The arrays that have a number for each head of the model."""
    shape = (case.artifact.model.num_layers, case.artifact.model.num_heads)
    return {
        name: case.arrays[name] for name, entry in _entries(case).items() if entry.shape == shape
    }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts)) or "none"


CHECKS: tuple[Callable[[Case], Checked], ...] = (
    uniform,
    near_dense,
    sizes,
    question,
    growth,
    shapes,
    gaps,
    summary,
    low_recall,
    imports,
    origin,
    history,
    decode,
    kv_cache,
)
