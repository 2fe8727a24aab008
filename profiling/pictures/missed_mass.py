"""Where one head's pattern loses attention on a prompt: what is missed, by cells, by queries and by keys.

Shapes: H query heads, S prompt length, P pooled cells, R query tiles, N key tiles, n queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from artifacts import Artifact, HeadwiseError
from kernels.index import TILE, SparseIndex, num_tiles
from profiling.inside.attention_rows import by_cell, cover, rows
from profiling.inside.capture import LayerInputs, capture
from profiling.pictures.head_survey import CELLS, HeadMap
from profiling.prompts.prompt import Prompt
from runtime.plans import layer_plans

if TYPE_CHECKING:
    from artifacts.sidecar import Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Missed:
    """Attention of one head that its pattern does not compute.

    drawn: the head's attention by cells, and what the pattern computes of each. cells: (P, P) share of a cell's
    queries' attention that goes to its keys and is missed. by_query: (S) share that each query misses. by_key: (S) how
    much each key is missed by all queries together, in queries' whole attention.
    """

    drawn: HeadMap
    cells: np.ndarray
    by_query: np.ndarray
    by_key: np.ndarray


class _SeenError(Exception):
    """Ends a pass when its layer has been."""


def missed_mass(
    model: Any, artifact: Artifact, arrays: Mapping[str, Array], prompt: Prompt, layer: int, head: int
) -> Missed:
    """Measure it on a dense pass that ends with the layer.

    Raises:
        HeadwiseError: the layer slides over a window in this model.
    """
    row = artifact.prefill.layers[layer]
    assert row is not None, "a layer that is left alone has no pattern"
    plan = layer_plans(artifact, arrays)[layer]
    found: list[Missed] = []

    def visit(inputs: LayerInputs) -> None:
        if inputs.layer != layer:
            return
        if inputs.sliding_window is not None:
            raise HeadwiseError(f"layer {layer} slides over {inputs.sliding_window} tokens in this model")
        index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
        found.append(_measure(inputs, index.of_heads(slice(head, head + 1)), head, row[head]))
        raise _SeenError

    try:
        capture(model, torch.tensor([prompt.input_ids], device=model.device), visit)
    except _SeenError:
        return found[0]
    raise HeadwiseError(f"layer {layer} of this model does not attend: no attention came by")


def _measure(inputs: LayerInputs, index: SparseIndex, head: int, pattern: str) -> Missed:
    """What a head, whose index is alone in `index`, misses of its attention."""
    length, device = inputs.q.shape[2], inputs.q.device
    cell = TILE * -(-num_tiles(length) // CELLS)
    size = -(-length // cell)
    tiles = torch.cat([mask[0, 0] for _, mask in index.row_masks()])
    columns = index.columns[0, 0].long()
    columns = columns[columns < length]
    attention, missed = (torch.zeros(size, size, device=device) for _ in range(2))
    by_query, by_key = (torch.zeros(length, device=device) for _ in range(2))
    for queries, share in rows(inputs, head, torch.arange(length, device=device)):
        attention.index_add_(0, queries // cell, by_cell(share, size, cell))
        lost = share.masked_fill_(_computed(tiles, columns, queries, length), 0.0)
        missed.index_add_(0, queries // cell, by_cell(lost, size, cell))
        by_query[queries] = lost.sum(1)
        by_key += lost.sum(0)
    counts = torch.full((size, 1), cell, device=device)
    counts[-1] = length - (size - 1) * cell
    drawn = HeadMap(
        layer=inputs.layer,
        head=head,
        cell=cell,
        attention=(attention / counts).cpu().numpy(),
        pattern=pattern,
        computed=cover(index, 0, cell).cpu().numpy(),
        density=float(index.density()[0, 0]),
        recall=1 - float(by_query.mean()),
    )
    cells, by_query, by_key = ((missed / counts).cpu(), by_query.cpu(), by_key.cpu())
    return Missed(drawn=drawn, cells=cells.numpy(), by_query=by_query.numpy(), by_key=by_key.numpy())


def _computed(tiles: Tensor, columns: Tensor, queries: Tensor, length: int) -> Tensor:
    """The keys that these queries compute, (n, S) bool, from tiles (R, N) and columns; later ones say nothing."""
    keys = tiles[queries // TILE].repeat_interleave(TILE, dim=1)[:, :length]
    keys[:, columns] = True
    return keys
