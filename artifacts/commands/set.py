"""set: an artifact with some fields changed, and what was changed over what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.cli.options import arg
from artifacts.commands import Outcome, answer, file_arg, json_flag, out_arg
from artifacts.errors import ArtifactError, shorten
from artifacts.files import check_writable
from artifacts.schema.artifact import Artifact, Edit, now
from artifacts.schema.validation import to_artifact
from artifacts.store import strict_yaml
from artifacts.store.write import update

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

SHORT = (
    "change fields: each change is written into `edits`, with what it "
    "replaced, and the hash is made anew"
)
EXAMPLES = """\
A FIELD is named by its path, as `show --json` and the errors have it; a VALUE is YAML. What the
search found and what was measured stays and is of the artifact as it was: measure again what
matters, `validate` says so.

examples:
  headwise set cfg.yaml prefill.dense_below=4096 --out new.yaml
  headwise set cfg.yaml decode.omnikv.budget=0.1 'prefill.layers[3][0]=dense' --out cfg.yaml
  headwise set cfg.yaml patterns.vs_100_1800.slash=2000 --out new.yaml
"""
# What is not a person's to say.
_OWN = ("schema_version", "created_at", "edits", "sidecar", "content_sha256")
_LONGEST = 200


@dataclass(frozen=True, kw_only=True)
class Config:
    """File to change, its new values, and the file to write."""

    file: Path = file_arg()
    changes: tuple[str, ...] = arg(
        metavar="FIELD=VALUE", nargs="+", help="a field's path and its new value"
    )
    out: Path = out_arg("the artifact to write; may be FILE itself")
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """Change and write.

    Raises:
        HeadwiseError: a field is not there or cannot have the value; the file cannot be read or
            written.
    """
    check_writable(config.out)
    wanted = [_parsed(change) for change in config.changes]

    def change(
        artifact: Artifact, arrays: dict[str, Array]
    ) -> tuple[Artifact, Mapping[str, Array]]:
        fields = artifact.model_dump(mode="json")
        over = artifact.content_sha256
        edits = []
        for path, value in wanted:
            if (before := _put(fields, path, value)) == value:
                raise ArtifactError(f"{shorten(path)}: is {_said(value)} already")
            edits.append(
                Edit(field=path, before=_said(before), after=_said(value), over=over).model_dump(
                    mode="json"
                )
            )
        fields |= {"edits": [*fields["edits"], *edits], "created_at": now()}
        return to_artifact(fields), arrays

    saved = update(config.file, change, out=config.out)
    made = saved.edits[-len(wanted) :]
    whole = {
        "wrote": str(config.out),
        "edits": [edit.model_dump(mode="json") for edit in made],
        "content_sha256": saved.content_sha256,
    }
    lines = [
        f"wrote {config.out}",
        *(f"  {edit.field}: {edit.before} -> {edit.after}" for edit in made),
    ]
    return answer(config.as_json, whole, lines)


def _parsed(change: str) -> tuple[str, Any]:
    path, equals, value = change.partition("=")
    if not equals or not path:
        raise ArtifactError(
            f"a change is FIELD=VALUE, such as prefill.dense_below=4096, got {shorten(change)}"
        )
    if path.partition(".")[0].partition("[")[0] in _OWN:
        raise ArtifactError(
            f"{shorten(path)}: is written by headwise, not set: change what it is made of"
        )
    try:
        if value:
            parsed = strict_yaml.parse(value)
        else:
            parsed = ""
        return path, parsed
    except ArtifactError as error:
        raise ArtifactError(f"{shorten(path)}: {str(error).removeprefix('line 1: ')}") from None


def _put(fields: Any, path: str, value: Any) -> Any:
    """Put the value in its place and give what was there."""
    node = fields
    rest = path
    while True:
        key, rest = _step(node, rest, path)
        if not rest:
            before = node[key]
            node[key] = value
            return before
        node = node[key]


def _step(node: Any, rest: str, path: str) -> tuple[Any, str]:
    """Split a path into its first key and the rest; pattern names may have dots of their own."""
    keys: Sequence[str] = ()
    if isinstance(node, dict):
        keys = [key for key in node if rest == key or rest.startswith((f"{key}.", f"{key}["))]
        if keys:
            key = max(keys, key=len)
            return key, rest[len(key) :].removeprefix(".")
    if isinstance(node, list) and rest.startswith("["):
        number, _, left = rest[1:].partition("]")
        if number.isascii() and number.isdigit() and len(number) < 6 and int(number) < len(node):
            return int(number), left.removeprefix(".")
    here = path[: len(path) - len(rest)].rstrip(".") or "the artifact"
    held = "no fields"
    if node and isinstance(node, dict):
        held = ", ".join(list(node)[:12])
    if node and isinstance(node, list):
        held = f"{len(node)} entries, [0] and so on"
    raise ArtifactError(f"{shorten(path)}: {here} has no {shorten(rest)}, it has: {held}")


def _said(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 3]}..."
