"""Model of an imported file, from the file, the model's config.json and flags."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from artifacts.errors import ArtifactError, naming, shorten
from artifacts.interop.report import Notes
from artifacts.interop.source import Source
from artifacts.schema.artifact import Artifact, Prefill
from artifacts.schema.fields import LARGEST, MOST
from artifacts.schema.model import ModelInfo

# For each size: names in config.json, flag, description.
_SIZES = {
    "num_layers": (("num_hidden_layers", "n_layer", "num_layers"), "--layers", "layers"),
    "num_heads": (("num_attention_heads", "n_head"), "--heads", "query heads"),
    "num_kv_heads": (("num_key_value_heads",), "--kv-heads", "KV heads"),
    "head_dim": (("head_dim",), "--head-dim", "channels a head"),
    "max_positions": (("max_position_embeddings", "n_positions"), "--max-positions", "positions"),
}
_KEYS = {key for keys, _, _ in _SIZES.values() for key in keys}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """User options for the model and for reading a file; None for a missing option.

    Attributes:
        config: path of the model's config.json.
        layers: number of layers.
        heads: number of query heads of a layer.
        kv_heads: number of KV heads of a layer.
        head_dim: width of a head.
        max_positions: longest context of the model in tokens.
        dense_below: as in prefill.
        dense_tail: as in prefill.
        sinks: first tokens that streaming heads keep.
        window: window of streaming heads in tokens.
        threshold: minimum score of KV heads that keep everything.
        sparsity: fraction of KV heads that stream, those with the smallest scores; an alternative
            to threshold.
    """

    config: Path | None = None
    model: str | None = None
    revision: str | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int | None = None
    dense_below: int | None = None
    dense_tail: int | None = None
    sinks: int | None = None
    window: int | None = None
    threshold: float | None = None
    sparsity: float | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model, its sliding-window layers, and the rest of its config.json."""

    model: ModelInfo
    sliding: frozenset[int]
    config: Mapping[str, Any]

    def artifact(self, **fields: Any) -> Artifact:
        """Make an artifact for the model with these fields; patterns are empty by default."""
        nothing = Prefill(dense_below=0, layers=(None,) * self.model.num_layers)
        return Artifact(
            **{"model": self.model, "search": None, "patterns": {}, "prefill": nothing} | fields
        )

    def leave(self, rows: Sequence[T], notes: Notes, heads: int = 1) -> tuple[T | None, ...]:
        """Replace the rows of sliding-window layers by None, with a note on `heads` heads each."""
        left = len(self.sliding) * heads
        notes.heads(
            "not carried over", "the layer has its own sliding window and is left alone", left
        )
        return tuple(None if layer in self.sliding else row for layer, row in enumerate(rows))


def model_shape(
    options: ImportOptions,
    file: Path,
    *,
    own: Mapping[str, Any] | None = None,
    least_layers: int = 0,
    **of_file: int,
) -> Shape:
    """Determine the model of an imported file.

    Args:
        options: config.json and flags of the user.
        file: imported file; its name is the fallback for the name of the model.
        own: fields of the file if it may be the model's config.json; used without another
            config.json.
        least_layers: minimum number of layers, for a file that does not show the number.
        of_file: sizes that the file shows, by their names in ModelInfo. The number of layers is a
            minimum, because a file may omit the last layers.

    Raises:
        ArtifactError: a size is missing, or two sources disagree; the message names the possible
            sources.
    """
    path, config = _config(options.config)
    if path is None and own is not None and set(own) & _KEYS:
        path = file
        config = own
    shown = {name: _size(name, options, path, config, of_file) for name in _SIZES}
    sizes = {name: size for name, size in shown.items() if size is not None}
    if missing := [_SIZES[name] for name, size in shown.items() if size is None]:
        whats = ", ".join(what for _, _, what in missing)
        flags = " ".join(flag for _, flag, _ in missing)
        raise ArtifactError(
            f"the file does not say how many {whats} the model has: give --config config.json or "
            f"{flags}"
        )
    if sizes["num_layers"] < (minimum := max(least_layers, of_file.get("num_layers", 0))):
        raise ArtifactError(
            f"has {minimum} layers, the model has {sizes['num_layers']}: which model is it?"
        )
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ArtifactError(
            f"the KV heads must divide the {sizes['num_heads']} query heads, got "
            f"{sizes['num_kv_heads']} (--kv-heads)"
        )
    architectures = config.get("architectures")
    architecture = None
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        architecture = architectures[0] or None
    model = ModelInfo(
        name=options.model or _name(path, config) or file.stem or "unknown",
        revision=options.revision,
        architecture=architecture,
        config_sha256=None,
        config=None,
        weights_sha256=None,
        rope=None,
        **sizes,
    )
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        sliding = [i for i, kind in enumerate(kinds) if kind != "full_attention"]
    else:
        sliding = []
    return Shape(
        model=model, sliding=frozenset(i for i in sliding if i < model.num_layers), config=config
    )


def _config(path: Path | None) -> tuple[Path | None, Mapping[str, Any]]:
    if path is None:
        return None, {}
    if os.path.isdir(path):
        path = path / "config.json"
    source = Source.read(path)
    with naming(path):
        config = source.json()
        if not isinstance(config, dict):
            raise ArtifactError(f"must be a model's config.json, got {shorten(config)}")
    text = config.get("text_config")
    if isinstance(text, dict):
        config = config | text
    return path, config


def _size(
    name: str,
    options: ImportOptions,
    path: Path | None,
    config: Mapping[str, Any],
    of_file: Mapping[str, int],
) -> int | None:
    """Return a size of the model from all sources; None if no source has it."""
    keys, flag, what = _SIZES[name]
    sizes: list[tuple[str, int]] = []
    flagged = getattr(options, flag[2:].replace("-", "_"))
    if flagged is not None:
        sizes.append((flag, flagged))
    key, value = next(
        ((key, config[key]) for key in keys if config.get(key) is not None), ("", None)
    )
    if value is None and config:
        key, value = _derived(name, config)
    if value is not None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArtifactError(f"{path}: {key}: must be a whole number, got {shorten(value)}")
        sizes.append((f"{path}: {key}", value))
    if name in of_file and (name != "num_layers" or not sizes):
        sizes.append(("the file", of_file[name]))
    if not sizes:
        return None
    for where, size in sizes:
        maximum = {"max_positions": LARGEST, "head_dim": 65_536}.get(name, MOST)
        if not 1 <= size <= maximum:
            raise ArtifactError(f"{where}: must be from 1 to {maximum}, got {shorten(size)}")
        if size != sizes[0][1]:
            raise ArtifactError(
                f"{sizes[0][0]} says {sizes[0][1]} {what}, {where} says {size}: which model is it?"
            )
    return sizes[0][1]


def _derived(name: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """Derive a missing size: KV heads from query heads, head width from the hidden size."""
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    if name == "num_kv_heads":
        return "num_attention_heads", heads
    if name == "head_dim" and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        return "hidden_size", hidden // heads
    return "", None


def _name(path: Path | None, config: Mapping[str, Any]) -> str | None:
    name = config.get("_name_or_path")
    if isinstance(name, str) and name:
        return name
    if path:
        return Path(os.path.realpath(path)).parent.name or None
    return None
