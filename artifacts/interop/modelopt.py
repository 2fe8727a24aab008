"""ModelOpt's sparse_attention_config: how many tiles a threshold shall skip, for the whole model at once.

It stands in the root of an exported checkpoint's config.json, or alone in a file: config_groups, of which one of
skip_softmax has target_sparsity for prefill and decode, the a and b of its calibration, and in `ignore` the modules
that stay dense; one of sparse_softmax keeps N of M keys. It has no patterns: which tiles are skipped, each prompt's
scores say. Here the nearest is block_sparse with as many blocks as leave out the same share.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.density import LONGEST, density, mean_density, num_tiles
from artifacts.errors import ArtifactError, one_line, shorten
from artifacts.fields import Imported
from artifacts.interop.files import bare, parse_json, read_bytes
from artifacts.interop.layers import Files, original
from artifacts.interop.report import Conversion, Notes, Report
from artifacts.interop.shape import Given, model_shape
from artifacts.patterns import BlockSparse, Dense, pattern_name
from artifacts.schema import Artifact, Prefill

if TYPE_CHECKING:
    from artifacts.sidecar import Array

_KEY = "sparse_attention_config"
_SKIP = ("skip_softmax", "softmax_skip")
# What ModelOpt's readers take where none is given.
_TARGET = 0.5
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,4})(?:\.|$)")


def read(path: Path, given: Given, *, dense_below: int | None = None, dense_tail: int | None = None) -> Conversion:
    """Read it into an artifact whose heads, but for the ignored layers', are block_sparse.

    Raises:
        ArtifactError: it is no such configuration, or has no group that skips tiles in prefill.
    """
    import numpy as np

    data, shown = read_bytes(path), one_line(str(path))
    whole = parse_json(path, data)
    root = whole.get(_KEY, whole) if isinstance(whole, dict) else None
    groups = root.get("config_groups") if isinstance(root, dict) else None
    if not isinstance(groups, dict):
        raise ArtifactError(f"{shown}: has no {_KEY} with config_groups")
    skips = [group for group in groups.values() if isinstance(group, dict) and _algorithm(group) in _SKIP]
    if len(skips) != 1:
        raise ArtifactError(f"{shown}: must have one group of skip_softmax, got {len(skips)}")
    target, ignored = _targets(shown, skips[0]), _ignored(shown, skips[0])
    shape = model_shape(given, path, own=whole, num_layers=max(ignored, default=0) + 1)
    model, notes = shape.model, Notes()
    length = min(model.max_positions, LONGEST)
    pattern = BlockSparse(blocks=_blocks(1 - target["prefill"], length))
    name = pattern_name(pattern)
    rows = [
        None if layer in shape.sliding else ("dense" if layer in ignored else name,) * model.num_heads
        for layer in range(model.num_layers)
    ]
    used = {each for row in rows for each in row or ()}
    sparse = sum(row is not None and row[0] == name for row in rows) * model.num_heads
    notes.some(
        "chooses otherwise", f"{name} computes {1 - target['prefill']:.4g} at {length:,} tokens; there by score", sparse
    )
    if "decode" in target:
        notes.some("not carried over", f"decode skips {target['decode']:.4g} of its tiles", sparse)
    for group in groups.values():
        if isinstance(group, dict) and _algorithm(group) == "sparse_softmax":
            counts = f"{shorten(group.get('sparsity_n'))} of {shorten(group.get('sparsity_m'))}"
            notes.some("not carried over", f"of every few keys some are kept in prefill: {counts}", sparse)
    prefill = Prefill(
        dense_below=dense_below or 0,
        dense_tail=dense_tail or 0,
        layers=tuple(rows),
        imported=Imported(format="modelopt", file=bare(path), sha256=hashlib.sha256(data).hexdigest()),
    )
    patterns = {each: known for each, known in (("dense", Dense()), (name, pattern)) if each in used}
    total = model.num_layers * model.num_heads
    return Conversion(
        artifact=shape.artifact(patterns=patterns, prefill=prefill),
        arrays={"imported.file": np.frombuffer(data, dtype=np.uint8)},
        report=Report(heads=total, exact=total - sparse, notes=notes.all()),
    )


def write(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> tuple[Files, Report]:
    """The configuration; an import that was not changed since as it was read, calibration and all.

    Raises:
        ArtifactError: the artifact has no patterns.
    """
    rows, model, notes = artifact.prefill.layers, artifact.model, Notes()
    if not artifact.patterns:
        raise ArtifactError("the artifact has no patterns, which is what this format is about")
    dense = [i for i, row in enumerate(rows) if row is None or all(artifact.patterns[n].kind == "dense" for n in row)]
    total = model.num_layers * model.num_heads
    exact = len(dense) * model.num_heads
    data = original(arrays, artifact.prefill.imported, "modelopt")
    if data is not None and not artifact.edits:
        return [(out, data)], Report(heads=total, exact=total)
    length = min(artifact.search.calibration.lengths[-1] if artifact.search else model.max_positions, LONGEST)
    # Layers that are left dense are named, and count for nothing in the target.
    searched = tuple(None if i in dense else row for i, row in enumerate(rows))
    share = mean_density(
        artifact.model_copy(update={"prefill": artifact.prefill.model_copy(update={"layers": searched})}),
        length,
        arrays,
    )
    sparsity = round(max(0.0, 1 - (1.0 if share is None else share)), 4)
    group = {
        "algorithm": "skip_softmax",
        "targets": [re.sub("ForCausalLM$", "Attention", model.architecture or "Attention")],
        "ignore": [f"model.layers.{layer}.self_attn" for layer in dense],
        "target_sparsity": {"prefill": sparsity},
    }
    notes.some(
        "chooses otherwise", f"{sparsity:.4g} of the tiles at {length:,} tokens, skipped by score", total - exact
    )
    notes.add("not carried over", "thresholds need a calibration: calibrate_sparse_attn.py fits a and b", 0)
    for name in ("decode", "kv_cache"):
        if getattr(artifact, name) is not None:
            notes.add("not carried over", f"the {name} section has no place in this format", 0)
    made = {_KEY: {"config_groups": {"group_0": group}, "producer": {"name": "headwise"}}}
    return [(out, json.dumps(made).encode() + b"\n")], Report(heads=total, exact=exact, notes=notes.all())


def _algorithm(group: Mapping[str, Any]) -> Any:
    return group.get("algorithm", group.get("sparse_algo"))


def _targets(shown: str, group: Mapping[str, Any]) -> dict[str, float]:
    given = group.get("target_sparsity", {})
    found = {"prefill": _TARGET, **given} if isinstance(given, dict) else {"prefill": given, "decode": given}
    for phase, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ArtifactError(f"{shown}: target_sparsity.{shorten(phase)} must be from 0 to 1, got {shorten(value)}")
    return found


def _ignored(shown: str, group: Mapping[str, Any]) -> set[int]:
    names = group.get("ignore", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ArtifactError(f"{shown}: ignore must be a list of modules, got {shorten(names)}")
    found = [_LAYER.search(name) for name in names]
    if odd := [name for name, layer in zip(names, found, strict=True) if layer is None]:
        raise ArtifactError(
            f"{shown}: ignore: must name a layer, such as model.layers.0.self_attn, got {shorten(odd[0])}"
        )
    return {int(layer[1]) for layer in found if layer}


def _blocks(share: float, length: int) -> int:
    """The fewest blocks that compute this share of the causal area."""
    low, high = 1, num_tiles(length)
    while low < high:
        middle = (low + high) // 2
        enough = (density(BlockSparse(blocks=middle), length) or 0.0) >= share
        low, high = (low, middle) if enough else (middle + 1, high)
    return low
