"""Scores the candidates of one layer against dense attention, through the kernels that will serve.

Shapes: H query heads, G KV heads, S prompt length, D head dim, C candidates (families).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kernels.attention import sparse_attention
from kernels.index import SparseIndex
from kernels.patterns import make
from kernels.patterns.dense import dense_index
from profiling.inside.capture import LayerInputs
from search.published.space import Family, builders, change_space


@dataclass(frozen=True, kw_only=True)
class Score:
    """How one candidate does for one head on one prompt.

    error: relative L2 distance of the head's output to dense attention's.
    recall: mean over the queries of the attention mass on computed keys.
    density: share of the causal tiles computed.
    within: whether the pattern keeps to the budget.
    """

    sizes: dict[str, int]
    error: float
    recall: float
    density: float
    within: bool


def score_layer(
    inputs: LayerInputs,
    families: Sequence[Family],
    target: int,
    dense_tail: int,
    sizes: Sequence[Sequence[dict[str, int]]] | None,
    *,
    backend: str,
) -> list[list[Score]]:
    """Scores of all heads and candidates of a layer, [H][C].

    Args:
        inputs: the layer's q (1, H, S, D), k (1, G, S, D) and v.
        families: the C entries of the initial space.
        target: tiles a head may compute.
        dense_tail: last queries that see every key, whatever the candidate.
        sizes: [H][C] sizes settled on an earlier prompt; None settles them here by ChangeSpace.
        backend: the attention backend, as for kernels.attention.sparse_attention.
    """
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    heads = range(q.shape[1])

    def attend(index: SparseIndex) -> tuple[Tensor, Tensor]:
        return sparse_attention(q, k, v, index, scale=scale, softcap=inputs.softcap, return_lse=True, backend=backend)

    dense, dense_lse = attend(dense_index(1, q.shape[1], q.shape[2], k.shape[2], q.device))
    norms = [float(dense[0, head].float().norm()) for head in heads]
    build = builders(families, q, k, scale=scale, dense_tail=dense_tail)
    by_family = []
    for c, family in enumerate(families):
        if sizes is None:
            patterns = change_space(family, target, build[family.kind], num_heads=q.shape[1], length=q.shape[2])
        else:
            patterns = [make(family.kind, **sizes[head][c]) for head in heads]
        index = build[family.kind](patterns)
        out, lse = attend(index)
        recall = torch.exp((lse - dense_lse)[0]).clamp_(max=1.0).mean(-1)
        tiles = index.computed_tiles()[0]
        by_family.append(
            [
                Score(
                    sizes={name: asdict(patterns[head])[name] for name, _ in family.start},
                    # Head by head: the fp32 difference of a whole layer would be the largest tensor of the search.
                    error=float((out[0, head].float() - dense[0, head].float()).norm()) / max(norms[head], 1e-30),
                    recall=float(recall[head]),
                    density=int(tiles[head]) / index.causal_tiles,
                    within=sizes is not None or int(tiles[head]) <= target,
                )
                for head in heads
            ]
        )
    return [[scores[head] for scores in by_family] for head in heads]
