"""ModelOpt's sparse_attention_config: how many tiles a threshold shall skip, for the whole model at once.

It stands in the root of an exported checkpoint's config.json, or alone in a file: config_groups, of which one of
skip_softmax has target_sparsity for prefill and decode, the a and b of its calibration, and in `ignore` the modules
that stay dense; one of sparse_softmax keeps N of M keys. TensorRT-LLM also reads the fields of the one group without
config_groups around it, and old files have sparse_softmax beside config_groups. Calibrated, it is our skip_softmax with
the scale factor a exp(b target), but that it compares with a running maximum, in tiles of 128: it skips less. Without
a and b the nearest is block_sparse with as many blocks as leave out the target's share.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.density import LONGEST, density, mean_density, num_tiles
from artifacts.errors import ArtifactError, shorten
from artifacts.fields import LARGEST
from artifacts.interop.report import Export, Import, Notes
from artifacts.interop.shape import Given, model_shape
from artifacts.interop.source import Source, original
from artifacts.patterns import TILE, BlockSparse, Dense, SkipSoftmax, pattern_name
from artifacts.schema import Artifact, Prefill

if TYPE_CHECKING:
    from artifacts.sidecar import Array

_KEY = "sparse_attention_config"
_SKIP = ("skip_softmax", "softmax_skip")
_FLAT = ("threshold_scale_factor", "target_sparsity")
# What ModelOpt's readers take where none is given.
_TARGET = 0.5
_FORMULA = "a * exp(b * target_sparsity)"
_THERE = "tiles of 128 are compared with a running maximum, which skips less"
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,4})(?:\.|$)")


def read(source: Source, given: Given) -> Import:
    """Read it into an artifact whose heads, but for the ignored layers', are skip_softmax, uncalibrated block_sparse.

    Raises:
        ArtifactError: it is no such configuration, or has no group that skips tiles in prefill.
    """
    whole = source.mapping()
    by_algorithm: dict[str, list[dict[str, Any]]] = {"skip": [], "n_of_m": []}
    for group in _groups(whole.get(_KEY, whole)):
        algorithm = group.get("algorithm", group.get("sparse_algo"))
        if algorithm in _SKIP or algorithm == "sparse_softmax":
            by_algorithm["skip" if algorithm in _SKIP else "n_of_m"].append(group)
    if len(by_algorithm["skip"]) != 1:
        raise ArtifactError(f"must have one group of skip_softmax, got {len(by_algorithm['skip'])}")
    target, ignored = _targets(by_algorithm["skip"][0]), _ignored(by_algorithm["skip"][0])
    shape = model_shape(given, source.path, own=whole, least_layers=max(ignored, default=0) + 1)
    model, notes, length = shape.model, Notes(), min(shape.model.max_positions, LONGEST)
    factor = _factor(by_algorithm["skip"][0], target["prefill"])
    pattern = (
        BlockSparse(blocks=_blocks(1 - target["prefill"], length))
        if factor is None
        else SkipSoftmax(scale_factor=factor)
    )
    name = pattern_name(pattern)
    named = [("dense" if layer in ignored else name,) * model.num_heads for layer in range(model.num_layers)]
    rows = shape.leave(named, notes, model.num_heads)
    sparse = sum(row is not None and row[0] == name for row in rows) * model.num_heads
    if factor is None:
        share = f"{name} computes {1 - target['prefill']:.4g} at {length:,} tokens; there by score"
        notes.heads("chooses otherwise", share, sparse)
    else:
        notes.heads("keeps less", f"{name} in tiles of {TILE}, by the own tile and the first; {_THERE}", sparse)
    if "decode" in target:
        notes.heads("not carried over", f"decode skips {target['decode']:.4g} of its tiles", sparse)
    for group in by_algorithm["n_of_m"]:
        counts = f"{shorten(group.get('sparsity_n'))} of {shorten(group.get('sparsity_m'))}"
        notes.heads("not carried over", f"of every few keys some are kept in prefill: {counts}", sparse)
    used = {each for row in rows for each in row or ()}
    prefill = Prefill(
        dense_below=given.dense_below or 0,
        dense_tail=given.dense_tail or 0,
        layers=rows,
        imported=source.imported("modelopt"),
    )
    patterns = {each: known for each, known in (("dense", Dense()), (name, pattern)) if each in used}
    total = model.num_layers * model.num_heads
    return Import(
        artifact=shape.artifact(patterns=patterns, prefill=prefill),
        arrays=source.kept("prefill"),
        report=notes.report(total, total - sparse),
    )


def write(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """The configuration; an import that was not changed since as it was read, calibration and all.

    Raises:
        ArtifactError: the artifact has no patterns.
    """
    rows, model, notes = artifact.prefill.layers, artifact.model, Notes()
    if not artifact.patterns:
        raise ArtifactError("the artifact has no patterns, which is what this format is about")
    dense = [i for i, row in enumerate(rows) if row is None or all(artifact.patterns[n].kind == "dense" for n in row)]
    total, exact = model.num_layers * model.num_heads, len(dense) * model.num_heads
    source = original("prefill", artifact.prefill.imported, arrays, "modelopt")
    if source is not None and not artifact.edits:
        notes.left_out(artifact, "prefill")
        return Export(files={out: source.data}, report=notes.report(total, total))
    length = min(artifact.search.calibration.lengths[-1] if artifact.search else model.max_positions, LONGEST)
    used = {pattern for i, row in enumerate(rows) if i not in dense for pattern in row or ()}
    factors = {p.scale_factor if isinstance(p := artifact.patterns[name], SkipSoftmax) else None for name in used}
    # Layers that are left dense are named, and count for nothing in the target.
    others = tuple(None if i in dense else row for i, row in enumerate(rows))
    searched = artifact.model_copy(update={"prefill": artifact.prefill.model_copy(update={"layers": others})})
    share = mean_density(searched, length, arrays)
    sparsity = round(max(0.0, 1 - (1.0 if share is None else share)), 4)
    group = {
        "algorithm": "skip_softmax",
        "targets": [re.sub("ForCausalLM$", "Attention", model.architecture or "Attention")],
        "ignore": [f"model.layers.{layer}.self_attn" for layer in dense],
        "target_sparsity": {"prefill": sparsity},
    }
    if len(factors) == 1 and (factor := factors.pop()) is not None:
        # With b = 0 every target has the artifact's own scale factor.
        group["threshold_scale_factor"] = {"formula": _FORMULA, "prefill": {"a": factor, "b": 0.0}}
        group["target_sparsity"] = {"prefill": _TARGET}
        notes.heads("computes more", f"there {_THERE}", total - exact)
    else:
        by_score = f"{sparsity:.4g} of the tiles at {length:,} tokens, skipped by score"
        notes.heads("chooses otherwise", by_score, total - exact)
        notes.file("not carried over", "thresholds need a calibration: calibrate_sparse_attn.py fits a and b")
    notes.left_out(artifact, "prefill")
    made = {_KEY: {"config_groups": {"group_0": group}, "producer": {"name": "headwise"}}}
    return Export(files={out: json.dumps(made).encode() + b"\n"}, report=notes.report(total, exact))


def _groups(root: Any) -> list[dict[str, Any]]:
    if not isinstance(root, dict) or not root.keys() & {"config_groups", *_FLAT}:
        raise ArtifactError(f"has no {_KEY} with config_groups")
    found = root.get("config_groups", {"": {"algorithm": "skip_softmax", **root}})
    if not isinstance(found, dict):
        raise ArtifactError(f"config_groups must be a mapping, got {shorten(found)}")
    groups = [group for group in found.values() if isinstance(group, dict)]
    if isinstance(old := root.get("sparse_softmax"), dict):
        # It wins over a group of the same algorithm.
        groups = [group for group in groups if group.get("algorithm") != "sparse_softmax"]
        groups.append({**old, "algorithm": "sparse_softmax"})
    return groups


def _targets(group: Mapping[str, Any]) -> dict[str, float]:
    given = group.get("target_sparsity", {})
    found = {"prefill": _TARGET, **given} if isinstance(given, dict) else {"prefill": given, "decode": given}
    for phase, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ArtifactError(f"target_sparsity.{shorten(phase)} must be from 0 to 1, got {shorten(value)}")
    return found


def _factor(group: Mapping[str, Any], target: float) -> float | None:
    """The scale factor of prefill: one that is given, or by a and b; None where the file is not calibrated."""
    given = group.get("threshold_scale_factor")
    found = given.get("prefill") if isinstance(given, dict) else given
    if found is None:
        return None
    if isinstance(found, dict):
        formula = given.get("formula", _FORMULA) if isinstance(given, dict) else _FORMULA
        if formula != _FORMULA:
            raise ArtifactError(f"threshold_scale_factor.formula must be {_FORMULA!r}, got {shorten(formula)}")
        a, b = (found.get(name, math.nan) for name in ("a", "b"))
        known = all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= LARGEST for x in (a, b))
        found = a * math.exp(min(b * target, 50.0)) if known else math.nan
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= LARGEST:
        raise ArtifactError(
            f"threshold_scale_factor must be a number above 0, or a and b that make one, got {shorten(given)}"
        )
    return float(f"{found:.6g}")


def _ignored(group: Mapping[str, Any]) -> set[int]:
    names = group.get("ignore", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ArtifactError(f"ignore must be a list of modules, got {shorten(names)}")
    found = {name: _LAYER.search(name) for name in names}
    if odd := [name for name, layer in found.items() if layer is None]:
        raise ArtifactError(f"ignore: must name a layer, such as model.layers.0.self_attn, got {shorten(odd[0])}")
    return {int(layer[1]) for layer in found.values() if layer}


def _blocks(share: float, length: int) -> int:
    """The fewest blocks that compute this share of the causal area."""
    low, high = 1, num_tiles(length)
    while low < high:
        middle = (low + high) // 2
        enough = (density(BlockSparse(blocks=middle), length) or 0.0) >= share
        low, high = (low, middle) if enough else (middle + 1, high)
    return low
