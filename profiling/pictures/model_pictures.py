"""Draws the survey of a model: each picture as PNG and SVG with its numbers.

Shapes: L layers, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from artifacts import Artifact
from artifacts.files import atomic_write
from artifacts.store.sidecar import to_bytes
from profiling.pictures.drawing import save, save_table
from profiling.pictures.head_pictures import grid_figure, maps_figure
from profiling.pictures.head_survey import HeadMap

T = TypeVar("T")
# Maps of one picture.
_MAPS = 4


def draw_maps(folder: Path, maps: Sequence[HeadMap], caption: str) -> list[Path]:
    """maps.png, .svg, and maps.safetensors with `<layer>.<head>.attention` and `.computed`."""
    arrays = {
        f"{head_map.layer}.{head_map.head}.attention": head_map.attention for head_map in maps
    }
    arrays |= {
        f"{head_map.layer}.{head_map.head}.computed": head_map.computed
        for head_map in maps
        if head_map.computed is not None
    }
    numbers = folder / "maps.safetensors"
    atomic_write(numbers, to_bytes(arrays))
    caption += f"\nattention by cells of {maps[0].cell} x {maps[0].cell} tokens"
    return [*save(maps_figure(maps, caption), folder / "maps"), numbers]


def draw_grid(folder: Path, name: str, values: np.ndarray, label: str, caption: str) -> list[Path]:
    """A fraction of each head, (L, H), NaN where not measured."""
    table = ([layer, *row] for layer, row in enumerate(values.astype(float).tolist()))
    header = ["layer", *(f"head {head}" for head in range(values.shape[1]))]
    stem = folder / name
    return [*save(grid_figure(values, label, caption), stem), save_table(stem, header, table)]


def typical_heads(artifact: Artifact, recall: np.ndarray) -> list[tuple[int, int]]:
    """Choose for each kind of pattern the head of nearest-to-mean recall, frequent kinds first."""
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for layer, row in enumerate(artifact.prefill.layers):
        for head, name in enumerate(row or ()):
            by_kind.setdefault(artifact.patterns[name].kind, []).append((layer, head))
    chosen = []
    for heads in sorted(by_kind.values(), key=len, reverse=True)[:_MAPS]:
        kept = np.array([recall[at] for at in heads])
        chosen.append(heads[int(np.abs(kept - kept.mean()).argmin())])
    return chosen


def some_heads(layers: Sequence[int], num_heads: int) -> list[tuple[int, int]]:
    """A few heads of different layers."""
    return [
        (layer, (at * num_heads) // _MAPS % num_heads)
        for at, layer in enumerate(spread(layers, _MAPS))
    ]


def spread(values: Sequence[T], most: int) -> list[T]:
    """At most so many of the values, evenly spaced, the first and the last among them."""
    at = np.unique(np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int))
    return [values[i] for i in at]
