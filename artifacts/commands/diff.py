"""Say what changed from A to B: sections, heads, density, evidence; exit status 3 if any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from artifacts.analysis.density import mean_density
from artifacts.cli.arguments import Json, YamlFile, deliver
from artifacts.cli.command import FOUND
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import one_line
from artifacts.schema.artifact import Artifact
from artifacts.schema.patterns import AnyPattern
from artifacts.store.hashing import content_of
from artifacts.store.read import read_lenient

EXAMPLES = """\
Heads are compared by what their pattern is, not by its name. Times, command lines and the
sidecar's name are left out, as in the content hash. Density is counted from the patterns' sizes
at one length. `git diff --no-index A B` shows every field.

examples:
  headwise diff old.yaml new.yaml --length 131072     density at 131,072 tokens
  headwise diff old.yaml new.yaml --json | jq .density
"""


class Config(CommandConfig):
    """Files to compare, and the length to count density at."""

    before: Annotated[YamlFile, Arg(metavar="A")]
    after: Annotated[YamlFile, Arg(metavar="B")]
    length: Annotated[
        int | None,
        Arg("count density on prompts of N tokens (as searched)"),
        Field(ge=1),
    ] = None
    as_json: Json = None


def run(config: Config) -> int:
    """Compare two artifacts; 3 for a difference.

    Raises:
        HeadwiseError: a YAML file is invalid.
    """
    # Only one sidecar is in memory at a time.
    pairs = [replace(read_lenient(file), arrays={}) for file in (config.before, config.after)]
    before, after = (pair.artifact for pair in pairs)
    length = config.length or _length(before, after)
    sections = _sections(before, after)
    facts: dict[str, Any] = {
        "differs": bool(sections),
        "sections": sections,
        "heads": {"changed": _changed(before, after), "kinds": [_kinds(before), _kinds(after)]},
        "length": length,
        "density": [mean_density(before, length), mean_density(after, length)],
        "evidence": [before.evidence.proof, after.evidence.proof],
    }
    faults = [f"sidecar    {pair.fault}" for pair in pairs if pair.fault]
    lines = list(_lines(facts)) if sections else ["no difference"]
    deliver("\n".join(map(one_line, [*faults, *lines])), facts, config.as_json)
    return FOUND if sections else 0


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"sections   {', '.join(facts['sections'])}"
    changed = facts["heads"]["changed"]
    old, new = facts["heads"]["kinds"]
    if changed is None:
        yield "heads      cannot be compared: the models have other numbers of layers or heads"
    elif changed:
        yield f"heads      {changed:,} have another pattern"
    for kind in sorted(old.keys() | new.keys()):
        if old.get(kind, 0) != new.get(kind, 0):
            yield f"  {kind:<16} {old.get(kind, 0):,} -> {new.get(kind, 0):,}"
    a, b = ("unknown" if value is None else f"{value:.4f}" for value in facts["density"])
    if a != b:
        yield f"density    {a} -> {b} at {facts['length']:,} tokens, counted from the sizes"
    a, b = facts["evidence"]
    if a != b:
        yield f"evidence   {a} -> {b}"


def _length(before: Artifact, after: Artifact) -> int:
    """Return the longer search length; without one, four times the larger dense_below."""
    searched = [a.search.calibration.length for a in (before, after) if a.search is not None]
    return max(searched or [4 * max(a.prefill.dense_below, 1024) for a in (before, after)])


def _sections(before: Artifact, after: Artifact) -> list[str]:
    """Return the fields that differ in the content that the hash covers."""
    old, new = (content_of(artifact.model_dump(mode="json")) for artifact in (before, after))
    return [name for name in old if old[name] != new[name]]


def _kinds(artifact: Artifact) -> dict[str, int]:
    rows = artifact.prefill.layers
    return dict(Counter(str(artifact.patterns[name].kind) for row in rows for name in row or ()))


def _changed(before: Artifact, after: Artifact) -> int | None:
    """Count heads with different patterns; None if the models differ in shape."""
    old, new = _patterns(before), _patterns(after)
    if [*map(len, old)] != [*map(len, new)]:
        return None
    return sum(a != b for a, b in zip(chain(*old), chain(*new), strict=True))


def _patterns(artifact: Artifact) -> list[list[AnyPattern | None]]:
    """Return the pattern of every head by layer; None in a layer without patterns."""
    rows = [row or (None,) * artifact.model.num_heads for row in artifact.prefill.layers]
    return [[artifact.patterns[name] if name else None for name in row] for row in rows]
