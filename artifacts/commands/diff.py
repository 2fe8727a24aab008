"""diff: which heads changed from one artifact to another, and what that does to density."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from artifacts.analysis.difference import Difference, HeadChange, compare
from artifacts.cli.command import FOUND
from artifacts.cli.options import arg
from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.errors import HeadwiseError, ranges, shorten
from artifacts.store.read import look

SHORT = (
    "say what changed from A to B: heads, density, sections, fields, "
    "arrays; exit status 3 if anything did"
)
EXAMPLES = """\
Heads are compared by what their pattern is, not by its name. Times, command lines and the
sidecar's name are left out, as in the content hash. Density is counted from the patterns' sizes
at one length; recall is the searches' own. A sidecar that is missing is said and left out.

examples:
  headwise diff old.yaml new.yaml
  headwise diff old.yaml new.yaml --length 131072     density at 131,072 tokens
  headwise diff old.yaml new.yaml --heads             every head, not the first of each change
  headwise diff old.yaml new.yaml --json | jq .density
"""
_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Config:
    """Files to compare, the length to count density at, and whether every head is listed."""

    before: Path = file_arg("A")
    after: Path = file_arg("B")
    length: int | None = arg(
        "--length",
        metavar="N",
        type=int,
        default=None,
        help="count density on prompts of N tokens (as searched)",
    )
    heads: bool = arg(
        "--heads", action="store_true", default=False, help="list every head that changed"
    )
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """The differences.

    Raises:
        ArtifactError: one of the YAML files is not as it should be.
    """
    if config.length is not None and config.length < 1:
        raise HeadwiseError(f"--length must be at least 1, got {config.length}")
    before = look(config.before)
    after = look(config.after)
    difference = compare(
        before.artifact, after.artifact, before.arrays, after.arrays, length=config.length
    )
    if difference:
        lines = list(_lines(difference, config.heads))
    else:
        lines = ["no difference"]
    faults = [f"sidecar    {pair.fault}" for pair in (before, after) if pair.fault]
    facts = {"differs": bool(difference), **asdict(difference)}
    if difference:
        status = FOUND
    else:
        status = 0
    return answer(config.as_json, facts, [*faults, *lines], status=status)


def _lines(difference: Difference, every: bool) -> Iterator[str]:
    if difference.heads is None:
        yield "heads      cannot be compared: the models have other numbers of layers or heads"
    else:
        yield (
            f"heads      {sum(change.heads for change in difference.heads):,} of "
            f"{difference.total:,} have another pattern"
        )
        yield from _changes(difference.heads, every)
    if difference.kv_heads:
        changed = sum(change.heads for change in difference.kv_heads)
        yield f"KV heads   {changed:,} have another policy"
        yield from _changes(difference.kv_heads, every)
    a, b = (f"{value:.4f}" if value is not None else "unknown" for value in difference.density)
    if a != b:
        yield f"density    {a} -> {b} at {difference.length:,} tokens, counted from the sizes"
    if difference.recall and difference.recall[0] != difference.recall[1]:
        yield f"recall     {difference.recall[0]:.4f} -> {difference.recall[1]:.4f}, as searched"
    for sign, names in (("+", difference.added), ("-", difference.removed)):
        yield from (f"section    {sign} {name}" for name in names)
    for change in difference.fields:
        yield f"field      {change.field}: {_shown(change.before)} -> {_shown(change.after)}"
    for change_kind, names in difference.arrays.items():
        if names:
            if len(names) > _SHOWN:
                more = f" and {len(names) - _SHOWN} more"
            else:
                more = ""
            yield f"arrays     {change_kind}: {', '.join(names[:_SHOWN])}{more}"


def _changes(changes: tuple[HeadChange, ...], every: bool) -> Iterator[str]:
    if every:
        listed = changes
    else:
        listed = changes[:_SHOWN]
    for change in listed:
        layers = [f"{layer} ({ranges(heads)})" for layer, heads in change.where.items()]
        if every:
            shown = layers
        else:
            shown = layers[:4]
        left = len(layers) - len(shown)
        if left:
            more = f" and in {left} more layer{'s' * (left > 1)}"
        else:
            more = ""
        yield (
            f"  {change.before or 'none'} -> {change.after or 'none'}: "
            f"{change.heads:,}: {', '.join(shown)}{more}"
        )
    if not every and len(changes) > _SHOWN:
        yield f"  and {len(changes) - _SHOWN} other changes (--heads lists them)"


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return shorten(value)
