"""Checks of a file that cannot be loaded: what its fields get wrong, beside the first fault that loading tells."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from artifacts import strict_yaml
from artifacts.errors import ArtifactError, plural, shorten
from artifacts.lint.rules import Finding, layers, odd
from artifacts.store import read_yaml


def broken(path: Path, error: ArtifactError) -> list[Finding]:
    """The findings of a file that loading refused with `error`; none where it is no artifact at all."""
    fields: Any = None
    with contextlib.suppress(ArtifactError):
        fields = strict_yaml.parse(read_yaml(path))
    if not isinstance(fields, dict) or not {"schema_version", "prefill", "model"} <= fields.keys():
        return []
    parts = [fields.get(name) for name in ("model", "prefill", "patterns")]
    model, prefill, patterns = (part if isinstance(part, dict) else {} for part in parts)
    why = str(error).removeprefix(f"{path}: ")
    return [odd("invalid", "file", why=why), *_rows(model, prefill), *_names(prefill, patterns)]


def _rows(model: dict[str, Any], prefill: dict[str, Any]) -> Iterator[Finding]:
    rows, count, heads = prefill.get("layers"), model.get("num_layers"), model.get("num_heads")
    if not isinstance(rows, list):
        return
    if isinstance(count, int) and len(rows) != count:
        yield odd("head-counts:rows", "prefill.layers", rows=len(rows), layers=count)
    wrong = [i for i, row in enumerate(rows) if isinstance(row, list) and isinstance(heads, int) and len(row) != heads]
    if wrong:
        first, names = wrong[0], len(rows[wrong[0]])
        yield odd("head-counts:names", "prefill.layers", layers=layers(wrong), heads=heads, first=first, names=names)


def _names(prefill: dict[str, Any], patterns: dict[str, Any]) -> Iterator[Finding]:
    rows = prefill.get("layers")
    if not isinstance(rows, list) or not patterns:
        return
    used = Counter(name for row in rows if isinstance(row, list) for name in row if isinstance(name, str))
    if unknown := [name for name in used if name not in patterns]:
        more = f" (and {len(unknown) - 1} names more)" if len(unknown) > 1 else ""
        heads = plural(used[unknown[0]], "head")
        yield odd("unknown-pattern", "prefill.layers", heads=heads, name=shorten(unknown[0]), more=more)
    # What the points of a front use, the sidecar says.
    if not prefill.get("front") and (unused := [name for name in patterns if name not in used]):
        yield odd("unused-pattern", "patterns", names=", ".join(map(shorten, unused[:5])))
