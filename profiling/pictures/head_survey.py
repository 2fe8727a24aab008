"""Attention maps and sparsity of single heads on a prompt.

Shapes: L layers, H query heads, S prompt length, P pooled cells. Layers that slide over a
window hold NaN, or are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from artifacts import Artifact, HeadwiseError
from kernels.attention import attend
from kernels.call import AttentionCall
from kernels.index import TILE, SparseIndex, num_tiles
from kernels.patterns import LayerPlan
from kernels.patterns.dense import dense_index
from profiling.inside.attention_rows import cover, pooled_map, sparsity_of
from profiling.inside.capture import LayerInputs, capture
from profiling.models.loading import LoadedModel
from profiling.progress import bar
from profiling.prompts.prompt import Prompt
from runtime.layers import attention_layers, make_plans, text_config

# A map has at most so many cells a side, however long the prompt.
CELLS = 128
# Queries, evenly spaced, that sparsity is taken over.
QUERIES = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadMap:
    """Attention of one head by cells of `cell` tokens, (P, P).

    With a pattern: the share of each cell that it computes, (P, P), its density, and the share of
    attention it keeps."""

    layer: int
    head: int
    cell: int
    attention: np.ndarray
    pattern: str | None = None
    computed: np.ndarray | None = None
    density: float | None = None
    recall: float | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Survey:
    """Sparsity of all heads, and attention maps of some.

    Attributes:
        sparsity: (L, H), NaN where not measured.
        maps: of the heads that were asked for.
    """

    sparsity: np.ndarray
    maps: list[HeadMap]


def survey(
    loaded: LoadedModel,
    prompt: Prompt,
    heads: Sequence[tuple[int, int]] = (),
    artifact: Artifact | None = None,
) -> Survey:
    """One dense pass over a prompt.

    Args:
        heads: (layer, head) of the maps.
        artifact: its patterns are drawn over them.

    Raises:
        HeadwiseError: a head that is not there or in a layer that slides; a model whose layers all
            do.
    """
    model = loaded.model
    length = len(prompt.input_ids)
    check_heads(loaded, heads)
    cell = TILE * -(-num_tiles(length) // CELLS)
    queries = (
        torch.linspace(
            0, length - 1, min(length, QUERIES), device=model.device, dtype=torch.float32
        )
        .round()
        .long()
    )
    if artifact is None:
        plans = {}
    else:
        plans = make_plans(artifact)
    sparsity = dict[int, np.ndarray]()
    maps = dict[tuple[int, int], HeadMap]()
    layers = attention_layers(model)

    def visit(inputs: LayerInputs) -> None:
        progress.update()
        wanted = sorted({head for layer, head in heads if layer == inputs.layer})
        if inputs.sliding_window is not None:
            if wanted:
                raise HeadwiseError(
                    f"layer {inputs.layer} of {loaded.name} does not see every token: choose heads "
                    "of another layer"
                )
            return
        sparsity[inputs.layer] = sparsity_of(inputs, queries).cpu().numpy()
        row = None
        built = None
        if artifact is not None and wanted:
            row = artifact.prefill.layers[inputs.layer]
            plan = plans.get(inputs.layer)
            if plan is None:
                built = None
            else:
                built = _built(inputs, plan)
        for head in wanted:
            attention = pooled_map(inputs, head, cell).cpu().numpy()
            drawn: dict[str, Any] = {}
            if built is not None and row is not None:
                drawn = {"pattern": row[head], **_drawn(*built, head, cell)}
            maps[inputs.layer, head] = HeadMap(
                layer=inputs.layer, head=head, cell=cell, attention=attention, **drawn
            )

    with bar(total=len(layers), desc="surveying", unit="layer") as progress:
        capture(
            model, torch.tensor([prompt.input_ids], device=model.device, dtype=torch.long), visit
        )
    if not sparsity:
        raise HeadwiseError(f"no layer of {loaded.name} sees every token of a prompt")
    whole = np.full((max(layers) + 1, len(next(iter(sparsity.values())))), np.nan, dtype=np.float32)
    whole[list(sparsity)] = np.stack(list(sparsity.values()))
    return Survey(sparsity=whole, maps=[maps[at] for at in dict.fromkeys(heads)])


def check_heads(loaded: LoadedModel, heads: Sequence[tuple[int, int]]) -> None:
    """Raise HeadwiseError where a model has no such layer or head."""
    layers = attention_layers(loaded.model)
    count = int(text_config(loaded.model).num_attention_heads)
    for layer, head in heads:
        if layer not in layers or not 0 <= head < count:
            raise HeadwiseError(
                f"{loaded.name} has no head {layer}.{head}: its layers are {min(layers)} to "
                f"{max(layers)}, "
                f"its heads 0 to {count - 1}"
            )


def _built(inputs: LayerInputs, plan: LayerPlan) -> tuple[SparseIndex, torch.Tensor]:
    """The layer's index, and the attention mass that each head keeps with it, (H)."""
    index = plan.build(inputs.q, inputs.k, scale=inputs.scale)
    whole = dense_index(
        1, len(plan.patterns), inputs.q.shape[2], inputs.k.shape[2], inputs.q.device
    )
    options: dict[str, Any] = {"scale": inputs.scale, "softcap": inputs.softcap}
    (_, every), (_, kept) = (
        attend(AttentionCall(inputs.q, inputs.k, inputs.v, which, **options))
        for which in (whole, index)
    )
    return index, (kept - every)[0].exp().clamp(max=1.0).mean(-1)


def _drawn(index: SparseIndex, recall: torch.Tensor, head: int, cell: int) -> dict[str, Any]:
    return {
        "computed": cover(index, head, cell).cpu().numpy(),
        "density": float(index.density()[0, head]),
        "recall": float(recall[head]),
    }
