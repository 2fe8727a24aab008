"""Checks of a file that cannot be loaded: what its fields get wrong, beside the first fault that loading tells."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from artifacts import strict_yaml
from artifacts.errors import ArtifactError, shorten
from artifacts.lint.finding import Finding, some
from artifacts.store import read_yaml


def broken(path: Path, error: ArtifactError) -> list[Finding]:
    """The findings of a file that loading refused with `error`; none where it is no artifact at all."""
    fields: Any = None
    with contextlib.suppress(ArtifactError):
        fields = strict_yaml.parse(read_yaml(path))
    if not isinstance(fields, dict) or not {"schema_version", "prefill", "model"} <= fields.keys():
        return []
    message = str(error).removeprefix(f"{path}: ")
    return [Finding(code="invalid", severity="error", where="file", message=message), *_table(fields)]


def _table(fields: Mapping[str, Any]) -> Iterator[Finding]:
    model, prefill, patterns = (fields.get(name) for name in ("model", "prefill", "patterns"))
    rows = prefill.get("layers") if isinstance(prefill, dict) else None
    if not isinstance(model, dict) or not isinstance(rows, list):
        return
    layers, heads = model.get("num_layers"), model.get("num_heads")
    if isinstance(layers, int) and len(rows) != layers:
        yield Finding(
            code="head-counts",
            severity="error",
            where="prefill.layers",
            message=f"has {len(rows)} rows, the model has {layers} layers: is it for this model?",
        )
    odd = [i for i, row in enumerate(rows) if isinstance(row, list) and isinstance(heads, int) and len(row) != heads]
    if odd:
        yield Finding(
            code="head-counts",
            severity="error",
            where="prefill.layers",
            message=f"layer{'s' * (len(odd) > 1)} {some(odd)}: not {heads} names, as many as the model has query heads "
            f"(layer {odd[0]} has {len(rows[odd[0]])})",
        )
    if not isinstance(patterns, dict):
        return
    used = Counter(name for row in rows if isinstance(row, list) for name in row if isinstance(name, str))
    if unknown := [name for name in used if name not in patterns]:
        yield Finding(
            code="unknown-pattern",
            severity="error",
            where="prefill.layers",
            message=f"{used[unknown[0]]} heads have {shorten(unknown[0])}, which patterns does not hold"
            + (f" (and {len(unknown) - 1} names more)" if len(unknown) > 1 else ""),
        )
    # What the points of a front use, the sidecar says.
    if (
        isinstance(prefill, dict)
        and not prefill.get("front")
        and (unused := [name for name in patterns if name not in used])
    ):
        yield Finding(
            code="unused-pattern",
            severity="error",
            where="patterns",
            message=f"no head has {', '.join(map(shorten, unused[:5]))}: remove {'them' if unused[1:] else 'it'}, or "
            f"use {'them' if unused[1:] else 'it'} in prefill.layers",
        )
