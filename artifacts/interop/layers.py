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
    return _import(
        source, "index_topk_pattern", shape, full, config.get("index_topk", _BUDGET), notes
    )


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
        "index_topk": _tokens(artifact, notes),
    }
    return _export(artifact, out, json.dumps(made).encode() + b"\n", notes)


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
        layers = {int(number) for number in numbers} if isinstance(numbers, list) else set()
    except (TypeError, ValueError):
        layers = set()
    if not layers or min(layers) < 0 or max(layers) >= MOST:
        raise ArtifactError(
            f"full_attention_layers: must be layers such as '0,2,7', got {shorten(named)}"
        )
    own = (
        {"num_hidden_layers": config["num_hidden_layers"]} if "num_hidden_layers" in config else {}
    )
    shape = model_shape(given, source.path, own=own, least_layers=max(layers) + 1)
    notes = Notes()
    for key, old in (
        ("sink_keep_tokens", "num_sink_tokens"),
        ("recent_keep_tokens", "num_recent_tokens"),
    ):
        if kept := config.get(key, config.get(old)):
            notes.file(
                "keeps less", f"{key}: {shorten(kept)} tokens that every sparse layer sees besides"
            )
    if (chunk := config.get("engine_prefill_chunk_size")) is not None:
        notes.file("not carried over", f"engine_prefill_chunk_size {shorten(chunk)}")
    full = [layer in layers for layer in range(shape.model.num_layers)]
    return _import(source, "sparse_vllm", shape, full, _kept_tokens(config), notes)


def write_sparse_vllm(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Write options for LLM(...) or --engine-kwargs; an unchanged import as it was read."""
    full = full_layers(artifact)
    notes = Notes()
    decode = section_of(artifact)
    omnikv = decode.omnikv
    if (source := original("decode", decode.imported, arrays, "sparse_vllm")) is not None:
        same = _filters(full) == (omnikv.filter_layers, omnikv.dense_layers)
        if same and omnikv.budget == _kept_tokens(source.mapping()):
            return _export(artifact, out, source.data, notes)
    if omnikv.selector != "last":
        notes.file(
            "chooses otherwise",
            f"the last query chooses, here {omnikv.selector} over {omnikv.window}",
        )
    made = {
        "sparse_method": "omnikv",
        "full_attention_layers": ",".join(str(layer) for layer, each in enumerate(full) if each),
        "decode_keep_tokens": _tokens(artifact, notes),
        "sink_keep_tokens": 0,
    }
    return _export(artifact, out, json.dumps(made).encode() + b"\n", notes)


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
    if not full[0] or all(full):
        why = (
            "the first layer must attend to everything"
            if not full[0]
            else "no layer takes tokens of another"
        )
        raise ArtifactError(why)
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
    source: Source, format: str, shape: Shape, full: Sequence[bool], budget: Any, notes: Notes
) -> Import:
    """Every layer has the same part on both sides; how tokens are chosen there, the notes say."""
    count = len(full)
    if count != shape.model.num_layers:
        raise ArtifactError(
            f"has {count} layers, the model has {shape.model.num_layers}: which one is it?"
        )
    shape.leave(full, notes)
    artifact = shape.artifact(decode=section(source, format, full, budget))
    return Import(
        artifact=artifact, arrays=source.kept("decode"), report=notes.report(count, count, _UNIT)
    )


def _export(artifact: Artifact, out: Path, data: bytes, notes: Notes) -> Export:
    notes.left_out(artifact, "decode")
    count = artifact.model.num_layers
    return Export(files={out: data}, report=notes.report(count, count, _UNIT))


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


def _tokens(artifact: Artifact, notes: Notes) -> int:
    budget = section_of(artifact).omnikv.budget
    most = artifact.model.max_positions
    if isinstance(budget, int):
        return budget
    tokens = max(1, round(budget * most))
    notes.file(
        "chooses otherwise",
        f"{tokens:,} tokens at any length: {budget:g} of {plural(most, 'token')}",
    )
    return tokens


def _indexers(config: Mapping[str, Any]) -> list[bool]:
    for key, known in (("indexer_types", ("full", "shared")), ("index_topk_pattern", ("F", "S"))):
        if (given := config.get(key)) is not None:
            listed = list(given) if isinstance(given, list | str) else []
            if not listed or len(listed) > MOST or any(each not in known for each in listed):
                raise ArtifactError(
                    f"must have {known[0]} or {known[1]} for each layer, got {shorten(given)}"
                )
            return [each == known[0] for each in listed]
    freq, count, offset = (
        config.get(key)
        for key in ("index_topk_freq", "num_hidden_layers", "index_skip_topk_offset")
    )
    offset = 2 if offset is None else offset
    if not all(type(number) is int and 1 <= number <= MOST for number in (freq, offset, count)):
        raise ArtifactError(
            "has no index_topk_pattern, no indexer_types, and no index_topk_freq with "
            "num_hidden_layers"
        )
    return [
        max(layer - int(offset) + 1, 0) % int(freq or 1) == 0 for layer in range(int(count or 0))
    ]
