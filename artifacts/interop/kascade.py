"""Kascade's anchor layers, from and to decode.omnikv; its map of KV heads has no place here.

An int32 .npy of shape (layers, KV heads): the KV head of the layer's anchor, the nearest one before
it, whose token list a head takes; anchor rows count from 0. The anchors themselves stand in the
file's name alone, MODEL_layers_0_2_8.npy. Layer 0 is always one."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from artifacts.errors import ArtifactError, one_line, shorten
from artifacts.interop.layers import full_layers, section, section_of
from artifacts.interop.report import Export, Import, Notes
from artifacts.interop.shape import Given, model_shape
from artifacts.interop.source import Source
from artifacts.schema.artifact import Artifact
from artifacts.schema.fields import MOST, MOST_HEADS

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# Kascade's own where nothing is said: a tenth of the keys, at least 128.
_SHARE = 0.1
_LEAST = 128
_NAME = re.compile(r".+_layers_((?:[0-9]{1,4}_)*[0-9]{1,4})\.npy")


def read(source: Source, given: Given) -> Import:
    """Read the anchors into an artifact's decode section.

    Raises:
        ArtifactError: it is no such map, or its name has no anchors.
    """
    import numpy as np

    named = _NAME.fullmatch(source.path.name)
    if named is None:
        raise ArtifactError("the name must say the anchors, such as MODEL_layers_0_2_8.npy")
    anchors = {int(number) for number in named[1].split("_")}
    table = _table(source.data)
    layers, heads = table.shape
    if 0 not in anchors or max(anchors) >= layers:
        raise ArtifactError(
            f"the anchors must be layers from 0 to {layers - 1}, 0 among them, got {named[1]}"
        )
    shape = model_shape(given, source.path, num_layers=layers, num_kv_heads=heads)
    full = np.isin(np.arange(layers), list(anchors))
    notes = Notes()
    decode = section(source, "kascade", full.tolist(), _LEAST)
    more = "an anchor attends to everything here, there to its own top tokens"
    notes.heads("computes more", more, (len(anchors) - 1) * heads)
    less = "ranks by the largest probability of its query heads, there by their sum"
    notes.heads("chooses otherwise", less, int((~full).sum()) * heads)
    alone = "takes the list of one KV head of its anchor there, here of all of them together"
    notes.heads("chooses otherwise", alone, int((~full).sum()) * heads)
    notes.file("keeps less", f"the budget is {_SHARE:.0%} of the keys; at least {_LEAST} there")
    omnikv = decode.omnikv.model_copy(update={"budget": _SHARE})
    artifact = shape.artifact(decode=decode.model_copy(update={"omnikv": omnikv}))
    return Import(artifact=artifact, arrays={}, report=notes.report(layers * heads, heads))


def write(artifact: Artifact, arrays: Mapping[str, Array], out: Path) -> Export:
    """Write the anchors, and a map in which each KV head reads the anchor's head of its number.

    Raises:
        ArtifactError: there is no decode section, or `out` is not called as the anchors want it.
    """
    import numpy as np

    full = full_layers(artifact)
    heads = artifact.model.num_kv_heads
    omnikv = section_of(artifact).omnikv
    anchors = [layer for layer, each in enumerate(full) if each]
    ending = f"_layers_{'_'.join(map(str, anchors))}.npy"
    if not out.name.endswith(ending) or out.name == ending:
        raise ArtifactError(
            f"{one_line(str(out))}: the name has to say the anchors: call it MODEL{ending}"
        )
    notes = Notes()
    table = np.tile(np.arange(heads, dtype="<i4"), (len(full), 1))
    notes.heads(
        "keeps less",
        "an anchor attends to its own top tokens, here to everything",
        (len(anchors) - 1) * heads,
    )
    served = full.count(False) * heads
    notes.heads(
        "chooses otherwise", "one KV head chooses for it there, here all of them together", served
    )
    budget = omnikv.budget
    if isinstance(budget, float):
        share = budget
    else:
        share = budget / artifact.model.max_positions
    notes.file(
        "same",
        f"serve it with --recompute_layers {' '.join(map(str, anchors))} --topk {100 * share:.3g}",
    )
    notes.left_out(artifact, "decode")
    stream = io.BytesIO()
    np.save(stream, table)
    return Export(files={out: stream.getvalue()}, report=notes.report(len(full) * heads, heads))


def _table(data: bytes) -> Array:
    """The map, read without pickle and not before its header fits."""
    import numpy as np

    try:
        stream = io.BytesIO(data)
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0
        else:
            header = np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(stream)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"is no .npy file ({shorten(str(error), 120)})") from None
    if len(shape) != 2 or dtype != np.dtype("<i4") or not all(1 <= size <= MOST for size in shape):
        raise ArtifactError(
            f"must be int32 of shape (layers, KV heads), got {dtype} of shape {shorten(shape)}"
        )
    count = shape[0] * shape[1]
    size = len(data) - stream.tell()
    if count > MOST_HEADS or size != 4 * count:
        raise ArtifactError(f"has {size} bytes for {count} heads of 4 each")
    order: Literal["F", "C"] = "C"
    if fortran:
        order = "F"
    table = np.frombuffer(data, dtype="<i4", offset=stream.tell()).reshape(shape, order=order)
    if table.min() < 0 or table.max() >= shape[1]:
        raise ArtifactError(
            f"must hold KV heads from 0 to {shape[1] - 1}, got {table.min()} to {table.max()}"
        )
    return np.ascontiguousarray(table, dtype=np.int32)
