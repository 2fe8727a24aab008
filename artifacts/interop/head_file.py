"""MInference's list of head patterns, also within AngelSlim's file.

A JSON list of layers, each a mapping from a query head's number to [name, a, b, score]:

* vertical_and_slash: a columns and b diagonals, chosen by the last 64 queries.
* stream_llm: the first a tokens and the last b.
* block_sparse: 100 blocks of 64 keys a row, regardless of a and b.
* flex_vertical_and_slash: a and b are [fraction, maximum] of columns and diagonals
  (FlexPrefill).

A missing head or layer gets vertical_and_slash 1000, 6096. The score comes from MInference's search
and is not read by MInference: a recall, or the number of output elements with an error.

AngelSlim keeps MInference's entries in a JSON object: best_pattern is a mapping from a layer's
number to the layer's mapping. model_fingerprint has config.json fields of the searched model.
AngelSlim runs block_sparse as vertical_and_slash with the same sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artifacts.errors import ArtifactError, shorten
from artifacts.schema.fields import LARGEST, MOST
from artifacts.schema.patterns import AnyPattern, AShape, BlockSparse, VerticalSlash

NAMES = ("vertical_and_slash", "stream_llm", "block_sparse", "flex_vertical_and_slash")
BLOCKS = 100


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Entry of a head in the file: [name, a, b, score], with its sizes and fractions.

    Attributes:
        shares: fractions of a flex_vertical_and_slash head.
        score: None for null.
    """

    as_json: list[Any]
    sizes: tuple[int, int]
    shares: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        """Name of the pattern in the file's words."""
        return str(self.as_json[0])

    @property
    def score(self) -> float | None:
        """Score of the head, None for null."""
        if self.as_json[3] is None:
            return None
        return float(self.as_json[3])

    def pattern(self) -> AnyPattern:
        """Return the pattern that MInference runs for the entry."""
        a, b = self.sizes
        match self.name:
            case "vertical_and_slash":
                return VerticalSlash(vertical=a, slash=b)
            case "flex_vertical_and_slash":
                return VerticalSlash(vertical=a, slash=b, coverage=max(self.shares or (1.0,)))
            case "stream_llm":
                return AShape(sink=a, window=b)
            case _:
                return BlockSparse(blocks=BLOCKS)


def entry(name: str, a: int, b: int, score: float | None = None) -> Entry:
    """Make an entry with these sizes."""
    return Entry(as_json=[name, a, b, score], sizes=(a, b))


LEFT_OUT = entry("vertical_and_slash", 1000, 6096)


def parse(document: Any) -> list[dict[int, Entry]]:
    """Parse the entries of each layer by head.

    Raises:
        ArtifactError: the document is not such a list; the message has the layer, the head, the
            value and the allowed values.
    """
    if is_angelslim(document):
        layers = _listed(document)
    else:
        layers = document
    if not isinstance(layers, list) or not layers:
        raise ArtifactError(f"must be a list with a mapping for each layer, got {shorten(layers)}")
    if len(layers) > MOST:
        raise ArtifactError(f"has {len(layers)} layers, the most that make sense are {MOST}")
    return [_layer(layer, row) for layer, row in enumerate(layers)]


def complete(
    layers: Sequence[dict[int, Entry]], num_layers: int, num_heads: int
) -> list[list[Entry]]:
    """Return the entries of every layer and head, with LEFT_OUT for missing ones."""
    filled = [*layers, *[dict[int, Entry]()] * (num_layers - len(layers))]
    return [[row.get(head, LEFT_OUT) for head in range(num_heads)] for row in filled]


def is_angelslim(document: Any) -> bool:
    """True for AngelSlim's object, False for MInference's list."""
    return isinstance(document, dict) and "best_pattern" in document


def fingerprint(document: Any) -> Mapping[str, Any]:
    """Return the config.json fields in AngelSlim's object; empty for a plain list.

    Raises:
        ArtifactError: model_fingerprint is not a mapping.
    """
    if is_angelslim(document):
        fields = document.get("model_fingerprint", {})
    else:
        fields = {}
    if not isinstance(fields, dict):
        raise ArtifactError(f"model_fingerprint must be a mapping, got {shorten(fields)}")
    return fields


def _listed(document: Mapping[str, Any]) -> list[Any]:
    """Return the layers of AngelSlim's object in order; missing layers are empty."""
    version = document.get("schema_version", 1)
    if version != 1:
        raise ArtifactError(f"schema_version must be 1, got {shorten(version)}")
    by_number = document["best_pattern"]
    if not isinstance(by_number, dict) or not by_number:
        raise ArtifactError(
            f"best_pattern must be a mapping from layers to heads, got {shorten(by_number)}"
        )
    for key in by_number:
        if not _is_index(key):
            raise ArtifactError(
                f"best_pattern: a layer must be a number from 0 on, got {shorten(key)}"
            )
    by_layer = {int(key): row for key, row in by_number.items()}
    return [by_layer.get(layer, {}) for layer in range(max(by_layer) + 1)]


def _layer(layer: int, row: Any) -> dict[int, Entry]:
    if not isinstance(row, dict):
        raise ArtifactError(
            f"layer {layer}: must be a mapping from heads to patterns, got {shorten(row)}"
        )
    entries = {}
    for key, value in row.items():
        if not _is_index(key):
            raise ArtifactError(
                f"layer {layer}: a head must be a number from 0 on, got {shorten(key)}"
            )
        try:
            entries[int(key)] = _entry(value)
        except ArtifactError as error:
            raise ArtifactError(f"layer {layer}, head {key}: {error}") from None
    return entries


def _is_index(key: str) -> bool:
    """True for the number of a layer or head in its canonical spelling."""
    return (
        key.isascii()
        and key.isdigit()
        and len(key) < 6
        and str(int(key)) == key
        and int(key) < MOST
    )


def _entry(value: Any) -> Entry:
    if not isinstance(value, list) or len(value) != 4:
        raise ArtifactError(f"must be [name, a, b, score], got {shorten(value)}")
    name, a, b, score = value
    if name not in NAMES:
        raise ArtifactError(f"must be one of {', '.join(NAMES)}, got {shorten(name)}")
    if score is not None and not _is_number(score):
        raise ArtifactError(f"the score must be a number or null, got {shorten(score)}")
    if name != "flex_vertical_and_slash":
        return Entry(as_json=value, sizes=(_size(a), _size(b)))
    if not all(isinstance(size, list) and len(size) == 2 for size in (a, b)):
        raise ArtifactError(
            f"must be [{name}, [share, most], [share, most], score], got {shorten(value)}"
        )
    if not all(_is_number(share) and 0 < share <= 1 for share in (a[0], b[0])):
        raise ArtifactError(f"a share must be above 0 and at most 1, got {shorten([a[0], b[0]])}")
    return Entry(as_json=value, sizes=(_size(a[1]), _size(b[1])), shares=(float(a[0]), float(b[0])))


def _is_number(value: Any) -> bool:
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    except OverflowError:
        return False


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ArtifactError(f"a size must be a whole number from 1 on, got {shorten(value)}")
    return value
