"""ModelOpt's sparse_attention_config: one threshold for the tiles that the model skips.

The configuration is in the root of an exported checkpoint's config.json, or in its own file. It has
config_groups. A group of skip_softmax has these fields:

* target_sparsity, for prefill and decode.
* threshold_scale_factor, with the calibration coefficients a and b.
* ignore, the modules that stay dense.

A group of sparse_softmax keeps N of M keys. TensorRT-LLM also reads the fields of a single group
without config_groups. Old files have sparse_softmax at the level of config_groups.

threshold_scale_factor is a number, a number or a and b for each phase, or a and b for both phases.
a and b are in `coefficients` or at the level of `formula`. With a and b, the factor is
a exp(b target), and the import is skip_softmax with that scale factor. Without them, the import is
block_sparse with a number of blocks that skips the target fraction.

ModelOpt compares tiles of width 128 with a running maximum from the left. Headwise compares tiles
of width 64 with the row's own tile and the first tile. Each skips some tiles that the other
computes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.analysis.density import LONGEST, density, mean_density
from artifacts.errors import ArtifactError, shorten
from artifacts.interop.format import HEADS, Format
from artifacts.interop.report import Export, Import, Notes
from artifacts.interop.shape import ImportOptions, model_shape
from artifacts.interop.source import Source, original
from artifacts.schema.artifact import Artifact, Prefill
from artifacts.schema.fields import LARGEST
from artifacts.schema.patterns import (
    TILE,
    AnyPattern,
    BlockSparse,
    Dense,
    SkipSoftmax,
    num_tiles,
    pattern_name,
)

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

_KEY = "sparse_attention_config"
_SKIP = ("skip_softmax", "softmax_skip")
_FLAT = ("threshold_scale_factor", "target_sparsity")
# Default of ModelOpt's readers.
_TARGET = 0.5
_FORMULA = "a * exp(b * target_sparsity)"
_THERE = "there tiles of 128, by a running maximum: each skips some that the other computes"
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,4})(?:\.|$)")


def read(source: Source, options: ImportOptions) -> Import:
    """Read the configuration into skip_softmax heads, uncalibrated into block_sparse heads.

    Raises:
        ArtifactError: the file is not such a configuration, or no group skips tiles in prefill.
    """
    whole = source.mapping()
    group, keep_n_of_m = _parted_groups(whole.get(_KEY, whole))
    targets = _targets(group)
    ignored = _ignored(group)
    shape = model_shape(options, source.path, own=whole, least_layers=max(ignored, default=0) + 1)
    model = shape.model
    target = targets.get("prefill", _TARGET)
    length = min(model.max_positions, LONGEST)
    pattern = _pattern(group, target, length)
    name = pattern_name(pattern)
    notes = Notes()
    named = [
        ("dense" if layer in ignored else name,) * model.num_heads
        for layer in range(model.num_layers)
    ]
    rows = shape.leave(named, notes, model.num_heads)
    sparse = sum(row is not None and row[0] == name for row in rows) * model.num_heads
    if isinstance(pattern, BlockSparse):
        computed = f"{name} computes {1 - target:.4g} at {length:,} tokens; there by score"
        notes.heads("chooses otherwise", computed, sparse)
    else:
        notes.heads(
            "chooses otherwise",
            f"{name} in tiles of {TILE}, by the own tile and the first; {_THERE}",
            sparse,
        )
    decode = _decode(group, targets)
    if decode is not None:
        notes.heads("not carried over", decode, sparse)
    for other in keep_n_of_m:
        counts = f"{shorten(other.get('sparsity_n'))} of {shorten(other.get('sparsity_m'))}"
        notes.heads(
            "not carried over", f"of every few keys some are kept in prefill: {counts}", sparse
        )
    prefill = Prefill(
        dense_below=options.dense_below or 0,
        dense_tail=options.dense_tail or 0,
        layers=rows,
        imported=source.imported("modelopt"),
    )
    used = {each for row in rows for each in row or ()}
    patterns: dict[str, AnyPattern] = {"dense": Dense(), name: pattern}
    total = model.num_layers * model.num_heads
    return Import(
        artifact=shape.artifact(
            patterns={name: pattern for name, pattern in patterns.items() if name in used},
            prefill=prefill,
        ),
        arrays=source.kept("prefill"),
        report=notes.report(total, total - sparse),
    )


def write(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Write the configuration; an unchanged import is copied with its calibration.

    Raises:
        ArtifactError: the artifact has no patterns.
    """
    if not artifact.patterns:
        raise ArtifactError("the artifact has no patterns, which is what this format is about")
    model = artifact.model
    total = model.num_layers * model.num_heads
    notes = Notes()
    source = original("prefill", artifact.prefill.imported, arrays, "modelopt")
    if source is not None and _unchanged(artifact, source):
        notes.left_out(artifact, "prefill")
        return Export(files={out: source.data}, report=notes.report(total, total))
    dense = _dense_layers(artifact)
    exact = len(dense) * model.num_heads
    group: dict[str, Any] = {
        "algorithm": "skip_softmax",
        "targets": [re.sub("ForCausalLM$", "Attention", model.architecture or "Attention")],
        "ignore": [f"model.layers.{layer}.self_attn" for layer in dense],
    }
    factor = _common_factor(artifact, dense)
    if factor is None:
        length = model.max_positions
        if artifact.search is not None:
            length = artifact.search.calibration.length
        length = min(length, LONGEST)
        sparsity = _sparsity(artifact, dense, length)
        group["target_sparsity"] = {"prefill": sparsity}
        by_score = f"{sparsity:.4g} of the tiles at {length:,} tokens, skipped by score"
        notes.heads("chooses otherwise", by_score, total - exact)
        notes.file(
            "not carried over",
            "thresholds need a calibration: calibrate_sparse_attn.py fits a and b",
        )
    else:
        # With b = 0 every target has the scale factor of the artifact.
        group["target_sparsity"] = {"prefill": _TARGET}
        group["threshold_scale_factor"] = {"formula": _FORMULA, "prefill": {"a": factor, "b": 0.0}}
        notes.heads("chooses otherwise", _THERE, total - exact)
    notes.left_out(artifact, "prefill")
    document = {_KEY: {"config_groups": {"group_0": group}, "producer": {"name": "headwise"}}}
    return Export(
        files={out: json.dumps(document).encode() + b"\n"}, report=notes.report(total, exact)
    )


def _pattern(group: Mapping[str, Any], target: float, length: int) -> SkipSoftmax | BlockSparse:
    """Return the pattern of the heads that skip tiles, for prompts of a length."""
    factor = _factor(group, target)
    if factor is None:
        return BlockSparse(blocks=_blocks(target, length))
    return SkipSoftmax(scale_factor=factor)


def _unchanged(artifact: Artifact, source: Source) -> bool:
    """True if every head has its pattern from the imported file."""
    whole = source.mapping()
    group, _ = _parted_groups(whole.get(_KEY, whole))
    ignored = _ignored(group)
    target = _targets(group).get("prefill", _TARGET)
    pattern = _pattern(group, target, min(artifact.model.max_positions, LONGEST))
    return all(
        artifact.patterns[name] == (Dense() if layer in ignored else pattern)
        for layer, row in enumerate(artifact.prefill.layers)
        for name in row or ()
    )


def _dense_layers(artifact: Artifact) -> list[int]:
    """Return the layers without a sparse head, which `ignore` names and the target excludes."""
    dense = []
    for layer, row in enumerate(artifact.prefill.layers):
        if row is None or all(artifact.patterns[name].kind == "dense" for name in row):
            dense.append(layer)
    return dense


def _common_factor(artifact: Artifact, dense: Collection[int]) -> float | None:
    """Common scale factor of heads outside the dense layers; None if another pattern occurs."""
    factors: set[float | None] = set()
    for layer, row in enumerate(artifact.prefill.layers):
        if layer in dense:
            continue
        for name in row or ():
            pattern = artifact.patterns[name]
            if isinstance(pattern, SkipSoftmax):
                factor = pattern.scale_factor
            else:
                factor = None
            factors.add(factor)
    if len(factors) == 1:
        return factors.pop()
    return None


def _sparsity(artifact: Artifact, dense: Collection[int], length: int) -> float:
    """Fraction of tiles that the heads outside the dense layers skip at a length."""
    rows = tuple(
        None if layer in dense else row for layer, row in enumerate(artifact.prefill.layers)
    )
    prefill = artifact.prefill.model_copy(update={"layers": rows})
    computed = mean_density(artifact.model_copy(update={"prefill": prefill}), length)
    if computed is None:
        return 0.0
    return round(max(0.0, 1 - computed), 4)


def _parted_groups(root: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the group of skip_softmax, and the groups that keep N of M keys.

    Raises:
        ArtifactError: there are no groups, or not exactly one that skips tiles.
    """
    skip = []
    keep_n_of_m = []
    for group in _groups(root):
        algorithm = group.get("algorithm", group.get("sparse_algo"))
        if algorithm in _SKIP:
            skip.append(group)
        elif algorithm == "sparse_softmax":
            keep_n_of_m.append(group)
    if len(skip) != 1:
        raise ArtifactError(f"must have one group of skip_softmax, got {len(skip)}")
    return skip[0], keep_n_of_m


def _groups(root: Any) -> list[dict[str, Any]]:
    """Return the groups; TensorRT-LLM also accepts a single group without config_groups."""
    if not isinstance(root, dict) or not root.keys() & {"config_groups", *_FLAT}:
        raise ArtifactError(f"has no {_KEY} with config_groups")
    by_name = root.get("config_groups", {"": {"algorithm": "skip_softmax", **root}})
    if not isinstance(by_name, dict):
        raise ArtifactError(f"config_groups must be a mapping, got {shorten(by_name)}")
    groups = [group for group in by_name.values() if isinstance(group, dict)]
    old = root.get("sparse_softmax")
    if isinstance(old, dict):
        # It takes precedence over a group of the same algorithm.
        groups = [group for group in groups if group.get("algorithm") != "sparse_softmax"]
        groups.append({**old, "algorithm": "sparse_softmax"})
    return groups


def _targets(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the target fraction of skipped tiles for each phase in the file."""
    entry = group.get("target_sparsity", {})
    if isinstance(entry, dict):
        targets = entry
    else:
        targets = {"prefill": entry, "decode": entry}
    for phase, value in targets.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ArtifactError(
                f"target_sparsity.{shorten(phase)} must be from 0 to 1, got {shorten(value)}"
            )
    return targets


def _threshold(group: Mapping[str, Any], phase: str) -> Any:
    """Return threshold_scale_factor of a phase: a number, a mapping with a and b, or None."""
    value = group.get("threshold_scale_factor")
    if not isinstance(value, dict):
        return value
    if value.get(phase) is not None:
        return value[phase]
    if "coefficients" in value:
        return value["coefficients"]
    if value.keys() & {"a", "b"}:
        return value
    return None


def _factor(group: Mapping[str, Any], target: float) -> float | None:
    """Scale factor of prefill, explicit or from a and b; None if the file is uncalibrated.

    Raises:
        ArtifactError: the factor is not a positive number, or the formula is not ModelOpt's.
    """
    value = group.get("threshold_scale_factor")
    threshold = _threshold(group, "prefill")
    if threshold is None:
        return None
    if isinstance(threshold, dict):
        formula = _FORMULA
        if isinstance(value, dict):
            formula = value.get("formula", _FORMULA)
        if not isinstance(formula, str) or formula.replace(" ", "") != _FORMULA.replace(" ", ""):
            raise ArtifactError(
                f"threshold_scale_factor.formula must be {_FORMULA!r}, got {shorten(formula)}"
            )
        a: Any = threshold.get("a")
        b: Any = threshold.get("b")
        threshold = None
        if _is_number(a) and _is_number(b):
            threshold = a * math.exp(min(b * target, 50.0))
    if not _is_number(threshold) or threshold <= 0:
        raise ArtifactError(
            f"threshold_scale_factor must be a number above 0, or a and b that make one, got "
            f"{shorten(value)}"
        )
    return float(f"{threshold:.6g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _decode(group: Mapping[str, Any], targets: Mapping[str, float]) -> str | None:
    """Describe the decode threshold, which an artifact cannot store; None without one."""
    threshold = _threshold(group, "decode")
    if isinstance(threshold, dict) or "decode" in targets:
        return f"decode skips {targets.get('decode', _TARGET):.4g} of its tiles"
    if threshold is not None:
        return f"decode skips tiles by a scale factor of {shorten(threshold)}"
    return None


def _ignored(group: Mapping[str, Any]) -> set[int]:
    """Return the layers whose modules stay dense."""
    modules = group.get("ignore", [])
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise ArtifactError(f"ignore must be a list of modules, got {shorten(modules)}")
    layers = set()
    for module in modules:
        named = _LAYER.search(module)
        if named is None:
            raise ArtifactError(
                f"ignore: must name a layer, such as model.layers.0.self_attn, got "
                f"{shorten(module)}"
            )
        layers.add(int(named[1]))
    return layers


def _blocks(sparsity: float, length: int) -> int:
    """Return the fewest blocks that skip at most this fraction of the causal area."""
    low = 1
    high = num_tiles(length)
    while low < high:
        middle = (low + high) // 2
        computed = density(BlockSparse(blocks=middle), length) or 0.0
        if computed >= 1 - sparsity:
            high = middle
        else:
            low = middle + 1
    return low


FORMAT = Format(
    name="modelopt",
    about="ModelOpt's sparse_attention_config, alone or in config.json",
    read=read,
    write=write,
    files=("config.json",),
    options=HEADS,
    patterns=True,
)
