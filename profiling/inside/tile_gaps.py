"""How far below a query's highest logits each tile of keys stays: what a threshold of skip-softmax
goes by.

Shapes: H query heads, G KV heads, S tokens, D head dim, n tiles.
"""

from __future__ import annotations

import torch

from kernels.index import TILE, num_tiles
from profiling.inside.capture import LayerInputs


def tile_gaps(inputs: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every causal tile the gap to its anchor (SparseIndex.skip), (H, n) fp32, and its row of
    tiles, (n,).

    A threshold with the log b skips the tiles whose gap is below b. Own tiles and key tile 0 have
    +inf."""
    heads, length = inputs.q.shape[1:3]
    group = heads // inputs.k.shape[1]
    rows = num_tiles(length)
    gaps = torch.full((heads, rows, rows), torch.inf)
    for head in range(heads):
        q = inputs.q[0, head].float()
        k = inputs.k[0, head // group].float()
        for row in range(2, rows):
            first = row * TILE
            last = min((row + 1) * TILE, length)
            logits = q[first:last] @ k[:last].T * inputs.scale
            if inputs.softcap is not None:
                logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
            logits[:, first:].masked_fill_(
                torch.ones(last - first, last - first).triu(1).bool().to(q.device), -torch.inf
            )
            best = logits[:, :first].unflatten(1, (row, TILE)).amax(-1)
            anchor = torch.maximum(best[:, 0], logits[:, first:].amax(-1))
            gaps[head, row, 1:row] = (best[:, 1:] - anchor[:, None]).amax(0).cpu()
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    return gaps[:, causal], torch.arange(rows)[:, None].expand(-1, rows)[causal]
