"""A sample of a prompt's query tiles.

One of each stretch of neighbouring tiles is drawn, those with large gradients more often, and
weighted by how often it is drawn. Stretches end where a dense tail begins.

Shapes: H query heads, S tokens, E value dim, n sampled tiles of 64 queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.index import TILE, dense_from, num_tiles

# One query tile in this many is drawn, but never fewer than _LEAST of a prompt.
_EVERY = 8
_LEAST = 16
# Half of the chance that a tile is drawn goes by its gradient, half to all tiles alike: no weight
# exceeds twice _EVERY.
_BY_GRADIENT = 0.5


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """Query tiles (n,) of a prompt and weights (n,): weighted sums estimate those over all."""

    rows: Tensor
    weights: Tensor


def sampled(by_out: Tensor | None, length: int, tails: Sequence[int], seed: int) -> Sample:
    """Draw the query tiles of a prompt's first `length` tokens to score on.

    Args:
        by_out: (1, H, S, E) gradients; without them (None) all tiles are alike.
        length: tokens of the prefill.
        tails: dense tails that are compared: each one's tiles are drawn from by themselves.
        seed: of the draw; the tiles depend on seed and gradients alone.
    """
    n = num_tiles(length)
    generator = np.random.default_rng(seed)
    size = np.ones(n)
    if by_out is not None:
        norms = by_out[0, :, :length].float().square().sum((0, 2))
        padded = torch.nn.functional.pad(norms, (0, -length % TILE))
        size = padded.unflatten(0, (-1, TILE)).sum(-1).sqrt().cpu().double().numpy()
    bounds = sorted({0, n, *(dense_from(tail, length) for tail in tails)})
    often = max(1 / _EVERY, _LEAST / n)
    edges = [0]
    for first, last in pairwise(bounds):
        count = min(last - first, max(1, round(often * (last - first))))
        edges += np.linspace(first, last, count + 1).round().astype(int).tolist()[1:]
    rows = []
    weights = []
    for start, stop in pairwise(edges):
        own = size[start:stop]
        share = np.full(stop - start, 1 / (stop - start))
        if own.sum() > 0:
            share = own / own.sum()
        chance = _BY_GRADIENT * share + (1 - _BY_GRADIENT) / (stop - start)
        drawn = int(generator.choice(stop - start, p=chance / chance.sum()))
        rows.append(start + drawn)
        weights.append(1 / chance[drawn])
    return Sample(
        rows=torch.tensor(rows, dtype=torch.long, device="cpu"),
        weights=torch.tensor(weights, dtype=torch.float64, device="cpu"),
    )
