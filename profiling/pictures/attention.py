"""Picture of one head's attention on a prompt, and of the part that its pattern computes.

Shapes: H query heads, S prompt length, P pooled cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from artifacts import Artifact, HeadwiseError
from profiling.pictures.drawing import MAP, MARK, new_figure
from profiling.pictures.registry import Drawing, Source, picture

if TYPE_CHECKING:
    from profiling.inside.capture import LayerInputs
    from profiling.models.loading import LoadedModel
    from profiling.prompts.prompt import Prompt

# Maximum number of cells on each side of a map, for any length of the prompt.
_CELLS = 128
# Fractions of a query's attention below this are drawn like it.
_FAINTEST = 1e-4
# How much the tiles that are not computed are lightened.
_WASH = 0.85


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadMap:
    """Attention of one head by cells, (P, P).

    Attributes:
        layer: its layer.
        head: query head.
        cell: tokens of a cell's side.
        attention: mean attention of a query to the cell's keys, (P, P).
        pattern: name of its pattern; None without an artifact, as what follows.
        computed: fraction of each cell that the pattern computes, (P, P).
        density: of the pattern.
        recall: fraction of attention that the pattern keeps.
    """

    layer: int
    head: int
    cell: int
    attention: np.ndarray
    pattern: str | None = None
    computed: np.ndarray | None = None
    density: float | None = None
    recall: float | None = None


@picture(of="model")
def attention(source: Source) -> Iterator[Drawing]:
    """Attention of `--head`, and with an artifact what its pattern computes of it."""
    from runtime.devices import execution_device

    assert source.loaded is not None and source.prompt is not None and source.head is not None
    head_map = measure(source.loaded, source.prompt, *source.head, source.artifact)
    model = source.loaded.model
    dtype = str(model.dtype).removeprefix("torch.")
    lines = [f"{source.loaded.name}, {dtype} on {execution_device(model)}; {source.prompt_name}"]
    if source.artifact is not None:
        lines.append(f"artifact: {source.artifact.content_sha256[:8]}")
    lines.append(f"drawn: {source.command}")
    lines.append(f"attention by cells of {head_map.cell} x {head_map.cell} tokens")
    computed = head_map.computed
    if computed is None:
        computed = np.full_like(head_map.attention, np.nan)
    causal = zip(*np.tril_indices(len(head_map.attention)), strict=True)
    yield Drawing(
        name=f"attention.{head_map.layer}.{head_map.head}",
        figure=attention_figure(head_map, "\n".join(lines)),
        header=["query", "key", "attention", "computed"],
        rows=(
            [
                int(y) * head_map.cell,
                int(x) * head_map.cell,
                float(head_map.attention[y, x]),
                float(computed[y, x]),
            ]
            for y, x in causal
        ),
    )


def measure(
    loaded: LoadedModel, prompt: Prompt, layer: int, head: int, artifact: Artifact | None
) -> HeadMap:
    """Measure the map of one head in a dense pass over a prompt.

    Raises:
        HeadwiseError: the model has no such head, or its layer slides over a window.
    """
    import torch

    from kernels.index import TILE, num_tiles
    from profiling.inside.attention_rows import pooled_map
    from profiling.inside.capture import capture
    from runtime.devices import execution_device
    from runtime.layers import attention_layers, text_config

    model = loaded.model
    layers = attention_layers(model)
    count = int(text_config(model).num_attention_heads)
    if layer not in layers or not 0 <= head < count:
        raise HeadwiseError(
            f"{loaded.name} has no head {layer}.{head}: its layers are {min(layers)} to "
            f"{max(layers)}, its heads 0 to {count - 1}"
        )
    cell = TILE * -(-num_tiles(len(prompt.input_ids)) // _CELLS)
    maps: list[HeadMap] = []

    def visit(inputs: LayerInputs) -> None:
        if inputs.layer != layer:
            return
        if inputs.sliding_window is not None:
            raise HeadwiseError(
                f"layer {layer} of {loaded.name} does not see every token: choose a head of "
                "another layer"
            )
        maps.append(
            HeadMap(
                layer=layer,
                head=head,
                cell=cell,
                attention=pooled_map(inputs, head, cell).cpu().numpy(),
                **_pattern_fields(inputs, head, cell, artifact),
            )
        )

    ids = torch.tensor([prompt.input_ids], device=execution_device(model), dtype=torch.long)
    capture(model, ids, visit)
    return maps[0]


def _pattern_fields(
    inputs: LayerInputs, head: int, cell: int, artifact: Artifact | None
) -> dict[str, Any]:
    """Fields of a HeadMap about the head's pattern; none without one."""
    from kernels.patterns.dense import dense_index
    from profiling.inside.attention_rows import cover
    from profiling.inside.head_fidelity import attend, kept_mass
    from runtime.layers import make_plans

    if artifact is None or (row := artifact.prefill.layers[inputs.layer]) is None:
        return {}
    index = make_plans(artifact)[inputs.layer].build(inputs.q, inputs.k, scale=inputs.scale)
    whole = dense_index(1, len(row), inputs.q.shape[2], inputs.k.shape[2], inputs.q.device)
    (_, dense_lse), (_, lse) = (attend(inputs, which, "auto") for which in (whole, index))
    recall = kept_mass(lse[0], dense_lse[0], inputs.logits.sinks)[head]
    return {
        "pattern": row[head],
        "computed": cover(index, head, cell).cpu().numpy(),
        "density": float(index.density()[0, head]),
        "recall": float(recall.mean()),
    }


def attention_figure(head_map: HeadMap, caption: str) -> Any:
    """Draw a head's attention, and next to it the part that its pattern computes."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    scale = ScalarMappable(LogNorm(_FAINTEST, 1.0), colormaps[MAP])
    columns = 1 if head_map.computed is None else 2
    figure = new_figure(2.9 * columns + 0.9, 3.3, caption, layout="compressed")
    grid = figure.subplots(1, columns, squeeze=False)[0]
    title = f"layer {head_map.layer}, head {head_map.head}"
    _panel(grid[0], head_map, scale, title, np.ones_like(head_map.attention))
    if head_map.computed is not None:
        title = f"{head_map.pattern}\nkeeps {head_map.recall:.3f}, computes {head_map.density:.3f}"
        _panel(grid[1], head_map, scale, title, head_map.computed)
        _outline(grid[1], head_map.computed, head_map.cell)
    figure.colorbar(
        scale, ax=grid, shrink=0.7, label="fraction of a query's attention", extend="min"
    )
    return figure


def _panel(axes: Any, head_map: HeadMap, scale: Any, title: str, computed: np.ndarray) -> None:
    count = len(head_map.attention)
    image = scale.to_rgba(np.maximum(head_map.attention, _FAINTEST))[..., :3]
    image += (1 - np.minimum(computed, 1.0))[..., None] * _WASH * (1 - image)
    image[np.triu_indices(count, 1)] = 1.0
    edge = count * head_map.cell
    axes.imshow(image, interpolation="nearest", extent=(0, edge, edge, 0))
    axes.set_title(title, fontsize=7, loc="left")
    axes.set_xticks([0, edge // 2, edge])
    axes.set_yticks([0, edge // 2, edge])
    axes.tick_params(labelsize=6)
    axes.set_xlabel("key", fontsize=7)
    axes.set_ylabel("query", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _outline(axes: Any, computed: np.ndarray, cell: int) -> None:
    """Draw a line around the cells of which more than half is computed."""
    from matplotlib.collections import LineCollection

    inside = np.pad(computed > 0.5, 1)
    lines = []
    for y, x in np.argwhere(inside[1:, 1:-1] != inside[:-1, 1:-1]):
        lines.append([(x * cell, y * cell), ((x + 1) * cell, y * cell)])
    for y, x in np.argwhere(inside[1:-1, 1:] != inside[1:-1, :-1]):
        lines.append([(x * cell, y * cell), (x * cell, (y + 1) * cell)])
    axes.add_collection(LineCollection(lines, colors=MARK, linewidths=0.6))
