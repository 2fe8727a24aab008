"""Which layers choose tokens for the others: index_topk_pattern and Sparse-vLLM, from and to decode.omnikv.

index_topk_pattern (IndexCache; transformers, vLLM, SGLang, TensorRT-LLM) has a letter for each decoder layer in the
root of config.json: F runs its indexer, S takes the tokens of the nearest F before it. indexer_types says the same as a
list of full and shared, and index_topk_freq with index_skip_topk_offset as a rule. Sparse-vLLM names the layers that
attend to everything in full_attention_layers; one that is followed by another kind chooses for those after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.decode import Decode, OmniKV
from artifacts.errors import ArtifactError, one_line, plural, shorten
from artifacts.fields import LARGEST, MOST, Imported
from artifacts.interop.files import bare, parse_json, read_bytes
from artifacts.interop.report import Conversion, Notes, Report
from artifacts.interop.shape import Given, Shape, model_shape
from artifacts.schema import Artifact

if TYPE_CHECKING:
    from artifacts.sidecar import Array

Files = list[tuple[Path, bytes]]
_INDEX_KEYS = ("indexer_types", "index_topk_pattern", "index_topk_freq")


def read_index_pattern(path: Path, given: Given) -> Conversion:
    """Read a config.json, or overrides of one, into an artifact that has a decode section.

    Raises:
        ArtifactError: it names no such layers, or others than the model has.
    """
    data, config = _json(path)
    full = _indexers(path, config)
    shape = model_shape(given, path, own=config, num_layers=len(full))
    notes = Notes()
    notes.some("computes more", "a layer that runs its indexer attends to everything here", sum(full))
    notes.some("chooses otherwise", "the filter layer's own attention chooses here, not an indexer", full.count(False))
    budget = config.get("index_topk", 2048)
    return _conversion(path, data, "index_topk_pattern", shape, full, budget, notes)


def write_index_pattern(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> tuple[Files, Report]:
    """Overrides for config.json, or for --hf-overrides and --json-model-override-args."""
    omnikv, notes = _omnikv(artifact), Notes()
    full = full_layers(artifact)
    notes.some("keeps less", "an F layer attends to what its indexer chooses, here to everything", sum(full))
    notes.some("chooses otherwise", "an indexer chooses, here the filter layer's own attention", full.count(False))
    letters = "".join("FS"[not each] for each in full)
    made = {
        "num_hidden_layers": len(full),
        "index_topk_pattern": letters,
        "indexer_types": ["full" if each else "shared" for each in full],
        "index_topk": _tokens(artifact, omnikv, notes),
    }
    return [(out, _dumped(made))], _report(artifact, notes)


def read_sparse_vllm(path: Path, given: Given) -> Conversion:
    """Read Sparse-vLLM's options, or the selected_full_layers.json of its search, into a decode section.

    Raises:
        ArtifactError: it names no full layers, another method, or layers that the model has not.
    """
    data, config = _json(path)
    if config.get("sparse_method", "omnikv") != "omnikv":
        raise ArtifactError(f"{path}: sparse_method: must be omnikv, got {shorten(config['sparse_method'])}")
    named = config.get("full_attention_layers", config.get("selected_full_layers"))
    numbers = named.split(",") if isinstance(named, str) else named
    try:
        layers = {int(number) for number in numbers} if isinstance(numbers, list) else set()
    except (TypeError, ValueError):
        layers = set()
    if not layers or min(layers) < 0 or max(layers) >= MOST:
        raise ArtifactError(f"{path}: full_attention_layers: must be layers such as '0,2,7', got {shorten(named)}")
    own = {"num_hidden_layers": config["num_hidden_layers"]} if "num_hidden_layers" in config else {}
    shape = model_shape(given, path, own=own, num_layers=max(layers) + 1)
    notes = Notes()
    for key, old in (("sink_keep_tokens", "num_sink_tokens"), ("recent_keep_tokens", "num_recent_tokens")):
        if kept := config.get(key, config.get(old)):
            notes.add("keeps less", f"{key}: {shorten(kept)} tokens that every sparse layer sees besides", 0)
    if (chunk := config.get("engine_prefill_chunk_size")) is not None:
        notes.add("not carried over", f"engine_prefill_chunk_size {shorten(chunk)}", 0)
    full = [layer in layers for layer in range(shape.model.num_layers)]
    budget = config.get("decode_keep_tokens", config.get("topk", 2048))
    return _conversion(path, data, "sparse_vllm", shape, full, budget, notes)


def write_sparse_vllm(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> tuple[Files, Report]:
    """Options for LLM(...) or --engine-kwargs; an import that was not changed since is written as it was read."""
    omnikv, notes = _omnikv(artifact), Notes()
    full = full_layers(artifact)
    if (data := original(arrays, artifact.decode.imported if artifact.decode else None, "sparse_vllm")) is not None:
        read = json.loads(data)
        same = _filters(full) == (omnikv.filter_layers, omnikv.dense_layers)
        if same and omnikv.budget == read.get("decode_keep_tokens", read.get("topk", 2048)):
            return [(out, data)], _report(artifact, notes)
    if omnikv.selector != "last":
        notes.add("chooses otherwise", f"the last query chooses, here {omnikv.selector} over {omnikv.window}", 0)
    made = {
        "sparse_method": "omnikv",
        "full_attention_layers": ",".join(str(layer) for layer, each in enumerate(full) if each),
        "decode_keep_tokens": _tokens(artifact, omnikv, notes),
        "sink_keep_tokens": 0,
    }
    return [(out, _dumped(made))], _report(artifact, notes)


def full_layers(artifact: Artifact) -> list[bool]:
    """For each layer whether it attends to everything in decode."""
    omnikv = _omnikv(artifact)
    first, named = omnikv.filter_layers[0], {*omnikv.filter_layers, *omnikv.dense_layers}
    return [layer < first or layer in named for layer in range(artifact.model.num_layers)]


def section(path: Path, data: bytes, format: Any, full: Sequence[bool], budget: Any) -> Decode:
    """The decode section of layers of which some attend to everything: those before others choose for them.

    Raises:
        ArtifactError: no layer is left to be served, the first attends not to everything, or the budget is none.
    """
    if not full[0] or all(full):
        why = "the first layer must attend to everything" if not full[0] else "no layer takes tokens of another"
        raise ArtifactError(f"{one_line(str(path))}: {why}")
    if not isinstance(budget, int) or isinstance(budget, bool) or not 1 <= budget <= LARGEST:
        raise ArtifactError(f"{one_line(str(path))}: the budget must be a number of tokens, got {shorten(budget)}")
    filters, dense = _filters(full)
    imported = Imported(format=format, file=bare(path), sha256=hashlib.sha256(data).hexdigest())
    return Decode(omnikv=OmniKV(filter_layers=filters, dense_layers=dense, budget=budget), imported=imported)


def original(arrays: Mapping[str, Array], imported: Imported | None, format: str) -> bytes | None:
    """The bytes of the file that a section was imported from, where it is of this format."""
    data = arrays.get("imported.file")
    if imported is None or imported.format != format or data is None:
        return None
    whole = data.tobytes()
    return whole if hashlib.sha256(whole).hexdigest() == imported.sha256 else None


def _filters(full: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    last = len(full) - 1
    filters = tuple(layer for layer, each in enumerate(full) if each and layer < last and not full[layer + 1])
    return filters, tuple(
        layer for layer, each in enumerate(full) if each and layer > filters[0] and layer not in filters
    )


def _conversion(
    path: Path, data: bytes, format: str, shape: Shape, full: Sequence[bool], budget: Any, notes: Notes
) -> Conversion:
    import numpy as np

    if len(full) != shape.model.num_layers:
        raise ArtifactError(
            f"{one_line(str(path))}: has {len(full)} layers, the model has {shape.model.num_layers}: which one is it?"
        )
    if shape.sliding:
        notes.some("not carried over", "the layer slides over a window of its own", len(shape.sliding))
    artifact = shape.artifact(decode=section(path, data, format, full, budget))
    arrays = {"imported.file": np.frombuffer(data, dtype=np.uint8)}
    return Conversion(artifact=artifact, arrays=arrays, report=_report(artifact, notes))


def _report(artifact: Artifact, notes: Notes) -> Report:
    """Every layer has the same part on both sides; how tokens are chosen there, the notes say."""
    count = artifact.model.num_layers
    return Report(heads=count, exact=count, unit="layer", notes=notes.all())


def _omnikv(artifact: Artifact) -> OmniKV:
    if artifact.decode is None:
        raise ArtifactError("the artifact has no decode section, which is what this format is about")
    return artifact.decode.omnikv


def _tokens(artifact: Artifact, omnikv: OmniKV, notes: Notes) -> int:
    if isinstance(omnikv.budget, int):
        return omnikv.budget
    most = artifact.model.max_positions
    tokens = max(1, round(omnikv.budget * most))
    notes.add("chooses otherwise", f"{tokens:,} tokens at any length: {omnikv.budget:g} of {plural(most, 'token')}", 0)
    return tokens


def _indexers(path: Path, config: Mapping[str, Any]) -> list[bool]:
    types, pattern, freq = (config.get(key) for key in _INDEX_KEYS)
    shown, count = one_line(str(path)), config.get("num_hidden_layers")
    if types is not None or pattern is not None:
        known = ("full", "shared") if types is not None else ("F", "S")
        given = types if types is not None else pattern
        listed = list(given) if isinstance(given, list | str) else []
        if not listed or len(listed) > MOST or any(each not in known for each in listed):
            raise ArtifactError(f"{shown}: must have {known[0]} or {known[1]} for each layer, got {shorten(given)}")
        return [each == known[0] for each in listed]
    offset = config.get("index_skip_topk_offset", 2)
    if not all(type(number) is int and 1 <= number <= MOST for number in (freq, offset, count)):
        raise ArtifactError(
            f"{shown}: has no index_topk_pattern, no indexer_types, and no index_topk_freq with num_hidden_layers"
        )
    assert isinstance(count, int) and isinstance(freq, int)
    return [max(layer - offset + 1, 0) % freq == 0 for layer in range(count)]


def _json(path: Path) -> tuple[bytes, dict[str, Any]]:
    data = read_bytes(path)
    config = parse_json(path, data)
    if not isinstance(config, dict):
        raise ArtifactError(f"{one_line(str(path))}: must be a JSON object, got {shorten(config)}")
    return data, config


def _dumped(made: Mapping[str, Any]) -> bytes:
    return json.dumps(made).encode() + b"\n"
