"""Layers that choose tokens for others: index_topk_pattern and Sparse-vLLM, and decode.omnikv.

index_topk_pattern (IndexCache; transformers, vLLM, SGLang, TensorRT-LLM) has a letter for each
decoder layer in the root of config.json: F runs its indexer, S takes the tokens of the nearest F
before it. indexer_types says the same as a list of full and shared, and index_topk_freq with
index_skip_topk_offset as a rule. Sparse-vLLM names the layers that attend to everything in
full_attention_layers; one that is followed by another kind chooses for those after it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, plural, shorten
from artifacts.interop.report import Export, Import, Notes
from artifacts.interop.shape import Given, Shape, model_shape
from artifacts.interop.source import Source, original
from artifacts.schema.artifact import Artifact
from artifacts.schema.decode import Decode, OmniKV
from artifacts.schema.fields import LARGEST, MOST

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

_BUDGET = 2048
_UNIT = "layer"


def read_index_pattern(source: Source, given: Given) -> Import:
    """Read a config.json, or overrides of one, into an artifact that has a decode section.

    Raises:
        ArtifactError: it names no such layers, or others than the model has.
    """
    config = source.mapping()
    full = _indexers(config)
    shape = model_shape(given, source.path, own=config, num_layers=len(full))
    notes = Notes()
    notes.heads(
        "computes more", "a layer that runs its indexer attends to everything here", sum(full)
    )
    notes.heads(
        "chooses otherwise",
        "the filter layer's own attention chooses here, not an indexer",
        full.count(False),
    )
    decode = section(source, "index_topk_pattern", full, config.get("index_topk", _BUDGET))
    return _import(source, shape, full, decode, notes, exact=0)


def write_index_pattern(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Overrides for config.json, or for --hf-overrides and --json-model-override-args."""
    full = full_layers(artifact)
    notes = Notes()
    notes.heads(
        "keeps less",
        "an F layer attends to what its indexer chooses, here to everything",
        sum(full),
    )
    notes.heads(
        "chooses otherwise",
        "an indexer chooses, here the filter layer's own attention",
        full.count(False),
    )
    made = {
        "num_hidden_layers": len(full),
        "index_topk_pattern": "".join("F" if each else "S" for each in full),
        "indexer_types": ["full" if each else "shared" for each in full],
        "index_topk": _tokens(artifact, full, notes),
    }
    return _export(artifact, out, json.dumps(made).encode() + b"\n", notes, exact=0)


def read_sparse_vllm(source: Source, given: Given) -> Import:
    """Read Sparse-vLLM's options, or its search's selected_full_layers.json, into a decode section.

    Raises:
        ArtifactError: it names no full layers, another method, or layers that the model has not.
    """
    config = source.mapping()
    if config.get("sparse_method", "omnikv") != "omnikv":
        raise ArtifactError(
            f"sparse_method: must be omnikv, got {shorten(config['sparse_method'])}"
        )
    named = config.get("full_attention_layers", config.get("selected_full_layers"))
    numbers = named.split(",") if isinstance(named, str) else named
    try:
        if isinstance(numbers, list):
            layers = {int(number) for number in numbers}
        else:
            layers = set()
    except (TypeError, ValueError):
        layers = set()
    if not layers or min(layers) < 0 or max(layers) >= MOST:
        raise ArtifactError(
            f"full_attention_layers: must be layers such as '0,2,7', got {shorten(named)}"
        )
    own = {key: config[key] for key in ("num_hidden_layers",) if key in config}
    shape = model_shape(given, source.path, own=own, least_layers=max(layers) + 1)
    full = [layer in layers for layer in range(shape.model.num_layers)]
    exact = len(full)
    notes = Notes()
    for key, old in (
        ("sink_keep_tokens", "num_sink_tokens"),
        ("recent_keep_tokens", "num_recent_tokens"),
    ):
        if kept := config.get(key, config.get(old)):
            seen = f"{key}: {shorten(kept)} tokens that a sparse layer sees there in any case"
            notes.heads("keeps less", seen, full.count(False))
            exact = full.count(True)
    if (chunk := config.get("engine_prefill_chunk_size")) is not None:
        notes.file("not carried over", f"engine_prefill_chunk_size {shorten(chunk)}")
    decode = section(source, "sparse_vllm", full, _kept_tokens(config))
    return _import(source, shape, full, decode, notes, exact=exact)


def write_sparse_vllm(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Write options for LLM(...) or --engine-kwargs; an unchanged import as it was read."""
    full = full_layers(artifact)
    notes = Notes()
    decode = section_of(artifact)
    omnikv = decode.omnikv
    if (source := original("decode", decode.imported, arrays, "sparse_vllm")) is not None:
        same = _filters(full) == (omnikv.filter_layers, omnikv.dense_layers)
        if same and omnikv.budget == _kept_tokens(source.mapping()):
            return _export(artifact, out, source.data, notes, exact=len(full))
    exact = len(full)
    if omnikv.selector != "last":
        chooses = f"the last query chooses, here {omnikv.selector} over {omnikv.window}"
        notes.heads("chooses otherwise", chooses, full.count(False))
        exact = full.count(True)
    if isinstance(omnikv.budget, float):
        exact = full.count(True)
    made = {
        "sparse_method": "omnikv",
        "full_attention_layers": ",".join(str(layer) for layer, each in enumerate(full) if each),
        "decode_keep_tokens": _tokens(artifact, full, notes),
        "sink_keep_tokens": 0,
    }
    return _export(artifact, out, json.dumps(made).encode() + b"\n", notes, exact=exact)


def full_layers(artifact: Artifact) -> list[bool]:
    """For each layer whether it attends to everything in decode.

    Raises:
        ArtifactError: the artifact has no decode section.
    """
    omnikv = section_of(artifact).omnikv
    first = omnikv.filter_layers[0]
    named = {*omnikv.filter_layers, *omnikv.dense_layers}
    return [layer < first or layer in named for layer in range(artifact.model.num_layers)]


def section(source: Source, format: str, full: Sequence[bool], budget: Any) -> Decode:
    """Decode section of layers, of which those with full attention choose for those after them.

    Raises:
        ArtifactError: no layer is left to be served, the first attends not to everything, or the
            budget is none.
    """
    if not full[0]:
        raise ArtifactError("the first layer must attend to everything")
    if all(full):
        raise ArtifactError("no layer takes tokens of another")
    if not isinstance(budget, int) or isinstance(budget, bool) or not 1 <= budget <= LARGEST:
        raise ArtifactError(f"the budget must be a number of tokens, got {shorten(budget)}")
    filters, dense = _filters(full)
    omnikv = OmniKV(filter_layers=filters, dense_layers=dense, budget=budget)
    return Decode(omnikv=omnikv, imported=source.imported(format))


def _filters(full: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    named = [layer for layer, each in enumerate(full) if each]
    filters = tuple(layer for layer in named if layer < len(full) - 1 and not full[layer + 1])
    return filters, tuple(layer for layer in named if layer > filters[0] and layer not in filters)


def _import(
    source: Source, shape: Shape, full: Sequence[bool], decode: Decode, notes: Notes, *, exact: int
) -> Import:
    """Artifact of the decode section; `exact` layers do the same on both sides."""
    if len(full) != shape.model.num_layers:
        raise ArtifactError(
            f"has {len(full)} layers, the model has {shape.model.num_layers}: which one is it?"
        )
    shape.leave(full, notes)
    return Import(
        artifact=shape.artifact(decode=decode),
        arrays=source.kept("decode"),
        report=notes.report(len(full), exact, _UNIT),
    )


def _export(artifact: Artifact, out: Path, data: bytes, notes: Notes, *, exact: int) -> Export:
    notes.left_out(artifact, "decode")
    return Export(files={out: data}, report=notes.report(artifact.model.num_layers, exact, _UNIT))


def section_of(artifact: Artifact) -> Decode:
    """The artifact's decode section.

    Raises:
        ArtifactError: it has none.
    """
    if artifact.decode is None:
        raise ArtifactError(
            "the artifact has no decode section, which is what this format is about"
        )
    return artifact.decode


def _kept_tokens(config: Mapping[str, Any]) -> Any:
    return config.get("decode_keep_tokens", config.get("topk", _BUDGET))


def _tokens(artifact: Artifact, full: Sequence[bool], notes: Notes) -> int:
    """The budget in tokens; a fraction becomes that of the model's longest prompt."""
    budget = section_of(artifact).omnikv.budget
    if isinstance(budget, int):
        return budget
    longest = artifact.model.max_positions
    tokens = max(1, round(budget * longest))
    fixed = f"{tokens:,} tokens at any length: {budget:g} of {plural(longest, 'token')}"
    notes.heads("chooses otherwise", fixed, full.count(False))
    return tokens


def _indexers(config: Mapping[str, Any]) -> list[bool]:
    for key, kinds in (("indexer_types", ("full", "shared")), ("index_topk_pattern", ("F", "S"))):
        if (given := config.get(key)) is not None:
            if isinstance(given, list | str):
                listed = list(given)
            else:
                listed = []
            if not listed or len(listed) > MOST or any(each not in kinds for each in listed):
                raise ArtifactError(
                    f"must have {kinds[0]} or {kinds[1]} for each layer, got {shorten(given)}"
                )
            return [each == kinds[0] for each in listed]
    freq, count, offset = (
        config.get(key)
        for key in ("index_topk_freq", "num_hidden_layers", "index_skip_topk_offset")
    )
    if offset is None:
        offset = 2
    if not all(type(number) is int and 1 <= number <= MOST for number in (freq, offset, count)):
        raise ArtifactError(
            "has no index_topk_pattern, no indexer_types, and no index_topk_freq with "
            "num_hidden_layers"
        )
    return [
        max(layer - int(offset) + 1, 0) % int(freq or 1) == 0 for layer in range(int(count or 0))
    ]
