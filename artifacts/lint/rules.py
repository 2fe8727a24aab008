"""What lint says: for each rule how severe it is, and in one line what is odd, why it matters and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from artifacts.schema import Artifact

if TYPE_CHECKING:
    from artifacts.sidecar import Array

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

# A code that is found in several ways has a rule for each: what stands behind the colon is no part of the code.
_ERRORS = {
    "invalid": "{why}",
    "head-counts:rows": "has {rows} rows, the model has {layers} layers: is it for this model?",
    "head-counts:names": "{layers}: not {heads} names, as many as the model has query heads (layer {first} has "
    "{names})",
    "unknown-pattern": "{heads} have {name}, which patterns does not hold{more}",
    "unused-pattern": "no head has {names}: remove what is not used, or use it in prefill.layers",
    "impossible-budget:search": "asks for {target:.4f} of dense attention, but a query's own tile, the first one and "
    "the dense tail of {tail} come to {least:.4f} at {length:,} tokens: no pattern can meet it; search with a larger "
    "budget or on longer prompts",
    "sidecar": "{why}",
    "head-counts:array": "has the shape {shape}, the model has {layers} layers of {heads} heads{more}: the sidecar is "
    "of another model; search again",
    "score-range": "{heads} have values such as {value:.4g}, a {measure} is {wanted}: the scores are of another scale; "
    "search again",
    "score-gap": "{layers}: has scores without patterns or patterns without scores: YAML and sidecar are of two "
    "searches; search again",
    "stale-summary": "says {said}, the rows have {found}: rows were changed after the search, and its scores are not "
    "theirs; search again",
    "stale-summary:mean": "says {said:.4f}, the mean of {array} is {mean:.4f}: one of them is of another search; "
    "search again",
}
_WARNINGS = {
    "nothing-sparse": "no layer has patterns and there is no other section: applying the artifact changes nothing",
    "nothing-sparse:dense": "every head is dense: prefill gains nothing; search with a smaller budget or longer "
    "prompts",
    "uniform": "all {heads} have {name}: heads differ, and a search head by head would keep more for the same cost; "
    "was this written by hand?",
    "near-dense": "{heads} of {all:,} compute {share:.0%} of dense attention or more at {length:,} tokens ({why}; "
    "{name} on {most}): sparse kernels win nothing there; {remedy}",
    "beyond-model": "{field} covers {tokens:,} tokens, the model takes {most:,}: the pattern is dense on that side; is "
    "the artifact for a model of longer context?",
    "misnamed": "is called as {name} would be, but is {is_}: rename it",
    "no-tail": "dense_tail is 0 and in {layers} every head sees sinks and a window alone: a question at the end finds "
    "nothing in the middle; set dense_tail to 64",
    "over-budget": "the patterns compute {found:.4f}, the budget was {target:.4f}: they are slower than asked; search "
    "again",
    "dense-budget": "allows {target:.4f} of dense attention: nothing is won; search with a smaller budget",
    "no-sidecar": "there is no file of scores: nobody can say why a head got its pattern; search again, or keep the "
    "pair together",
    "low-recall": "{heads} keep less than {share:.0%} of their attention (down to {worst:.2f}; most in layer {layer}, "
    "{layers} in all): whatever the budget, these heads lose; give them dense or a larger pattern",
    "no-scores": "the imported file has no scores: nobody can say how good its patterns are; measure them with python "
    "-m profiling.evaluate --fidelity",
    "mixed-scales": "{shares} have scores between 0 and 1 and {larger} up to {most:,.6g}: two scales in one file, no "
    "mean means anything; was the file put together of two searches?",
    "foreign-scores": "scores run from {least} to {most}: no recalls, most likely how many elements of the output were "
    "off (less is better), and not to be compared between heads of other sizes; measure recall with python -m "
    "profiling.evaluate --fidelity",
    "constant-scores": "every head has the score {score:.6g}: made up or left at a default; measure with python -m "
    "profiling.evaluate --fidelity",
    "mixed-precision": "the recalls of {names} ({heads}) are multiples of 1/512, those of other patterns are not: they "
    "were measured in half precision beside full, and won or lost by their rounding; measure recall with python -m "
    "profiling.evaluate --fidelity",
    "no-fingerprint": "is open: the artifact is applied to any model of this shape without a word; python -m "
    "search.gate --out fills it in",
    "unsearched": "the patterns were taken over from {file}: no prompts, lengths or seed say on what they hold; "
    "measure them, or search",
    "searched-below": "prompts below {below:,} tokens are served densely, but the search saw none above {longest:,}: "
    "the patterns are used on no length that they were chosen for; search on longer prompts",
    "no-evidence": "nothing was measured with it: whether it is faster, and still right, nobody knows; run python -m "
    "profiling.evaluate --attach",
    "slower": "{name} took {value}{length}, {baseline_name} {baseline:.4g}: raise dense_below above that length, or "
    "take smaller sizes",
    "unfitted-growth": "sizes go with powers of the length, but {seen}: they are guessed; search on several lengths, "
    "or measure at others with python -m profiling.evaluate --fidelity",
    "front-below": "the points' figures are for {length:,} tokens, but prompts below {below:,} are served densely: no "
    "target holds where the patterns are used; search on longer prompts",
    "no-sparse-layer": "every layer filters or is dense: decode attends to everything and chooses for nobody; name "
    "fewer filter layers",
    "impossible-budget": "keeps {tokens:,} tokens, the model takes {most:,}: nothing is ever left out",
    "poor-filters": "the filter layers keep {kept:.4f} of the attention on held-out prompts, evenly spaced ones "
    "{even:.4f}: the choice fits its own prompts only; search on more tasks",
    "nothing-freed": "every KV head keeps everything: the section frees no memory; remove it or name other policies",
    "no-sinks": "keeps no sinks: perplexity breaks down as soon as the first tokens leave the window; keep 4",
    "sliding-layers": "{layers} slides according to kv_cache but has patterns in prefill: one of the two is for "
    "another model",
}
_NOTES = {
    "one-kind": "all {heads} are {kind}, in {sizes} sizes: other kinds were not tried or never won; a search with more "
    "kinds may keep more",
    "twins": "computes the same as {other}: one name would do",
    "below-tile": "{names}, on {heads}: sizes below {tile} count as {tile}, because the first {tile} columns and "
    "nearest {tile} diagonals are always computed",
    "score-above-one": "{heads} have recalls above 1 (up to {most:.6f}): a rounding error of low precision, and others "
    "have it too; read the last digits with care",
    "one-prompt": "was searched on a single prompt of {longest:,} tokens: chance decides between near candidates; "
    "search with --samples 3 or more",
    "one-length": "was searched at {longest:,} tokens only: sizes that fit one length may not fit another",
    "short-search": "was searched on prompts of up to {longest:,} tokens, the model takes {most:,}: nothing is known "
    "of the patterns there; measure them with python -m profiling.evaluate --fidelity",
    "edited": "{field} was set from {before} to {after}{more}: search and evidence are of the artifact before; measure "
    "again what matters",
    "no-baseline": "{name} has no baseline: {value} beside nothing says little; measure dense attention in the same "
    "run",
    "in-sample-front": "kl and recall of the points are from prompts that the search chose them by: others lose more; "
    "measure with python -m profiling.evaluate before relying on a target",
    "off-front": "is none of the front's points: what is served where no target is given has no figures there",
    "few-sparse-layers": "{full} of {layers} layers attend to everything: decode can win less than half",
    "no-similarity": "how much attention the filter layers keep was not measured; python -m search.filters does",
    "uniform-cache": "all {heads} have {name}: some heads look far back and lose most",
}
RULES: dict[str, tuple[Severity, str]] = {
    **{code: ("error", says) for code, says in _ERRORS.items()},
    **{code: ("warning", says) for code, says in _WARNINGS.items()},
    **{code: ("note", says) for code, says in _NOTES.items()},
    "near-dense:all": ("error", _WARNINGS["near-dense"]),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is odd.

    code: its rule, to be ignored by. severity: "error" is a contradiction or a loss on every prompt, "warning" most
    likely a mistake, "note" worth knowing. where: the field or array. message: what, why, what to do.
    """

    code: str
    severity: Severity
    where: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a check looks at.

    arrays: the sidecar's; None where it is missing or changed, which `fault` then says. length: a length of prompts to
    look at, in tokens, beside those that the artifact names.
    """

    artifact: Artifact
    arrays: Mapping[str, Array] | None = field(default_factory=dict)
    fault: str | None = None
    length: int | None = None

    @property
    def named(self) -> int:
        """Heads that have a pattern."""
        return sum(len(row) for row in self.artifact.prefill.layers if row is not None)


def odd(rule: str, where: str, **values: Any) -> Finding:
    """What a rule says of a field or array, with these values."""
    severity, says = RULES[rule]
    return Finding(code=rule.partition(":")[0], severity=severity, where=where, message=says.format(**values))


def layers(numbers: list[int], limit: int = 5) -> str:
    """layer 3, layers 1, 2 and 3, or layers 1, 2, 3, 4, 5 and 7 more."""
    shown = ", ".join(map(str, numbers[:limit]))
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return f"layer{'s' * (len(numbers) > 1)} {shown}{more}"
