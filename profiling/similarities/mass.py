"""Attention of a layer on the tokens that another ranks first: OmniKV's layer similarity.

Shapes: L layers, N of them measured (in order), K keys, k top keys, T tasks, H query heads, G KV
heads, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def top_key_mass(means: Tensor, top_keys: Tensor) -> Tensor:
    """Compute S[i, j], layer j's attention on the top keys of layer i, (N, N) fp64.

    Args:
        means: (N, K), each layer's attention averaged over its query heads.
        top_keys: (N, k) key positions.
    """
    # Row by row: all at once would gather N x N x k.
    return torch.stack([means[:, keys].sum(1, dtype=torch.float64) for keys in top_keys])


def attention_output(probabilities: Tensor, v: Tensor, keys: Tensor | None = None) -> Tensor:
    """A query's output from all keys, or from some keys (k,) alone: (G, n, E) fp32.

    Args:
        probabilities: (G, n, K); with attention sinks, a row sums to less than 1.
        v: (G, K, E).
        keys: (k,) positions of the keys; None for all.
    """
    if keys is None:
        return torch.bmm(probabilities, v.float())
    weights = probabilities[:, :, keys]
    # The weight of omitted keys is redistributed to the other keys and to the sinks. The weight of
    # the sinks is 1 minus the row's sum, if that exceeds rounding.
    sinks = 1 - probabilities.sum(-1, keepdim=True)
    sinks = torch.where(sinks > 1e-4, sinks, 0)
    weights = weights / (sinks + weights.sum(-1, keepdim=True)).clamp_min(1e-30)
    return torch.bmm(weights, v[:, keys].float())


def span_coverage(span: tuple[int, int], top_keys: Tensor) -> Tensor:
    """Compute the fraction of a span that each layer's top keys (N, k) hold, (N) fp64."""
    return ((top_keys >= span[0]) & (top_keys < span[1])).sum(1, dtype=torch.float64) / (
        span[1] - span[0]
    )


def ability(mass: np.ndarray, reach: int) -> np.ndarray:
    """Compute filtering ability (OmniKV, Figure 6a): mean kept by the `reach` layers after.

    Args:
        mass: (L, L), NaN where not measured.
        reach: how many layers after each one count.

    Returns:
        (L), NaN where no layer was measured within reach.
    """
    means = np.full(len(mass), np.nan)
    for layer in range(len(mass)):
        after = mass[layer, layer + 1 : layer + 1 + reach]
        if np.isfinite(after).any():
            means[layer] = np.nanmean(after)
    return means


def agreement(masses: Sequence[np.ndarray]) -> np.ndarray:
    """Correlate layer similarities between tasks, (T, T); NaN where they are constant.

    Args:
        masses: one (L, L) a task, NaN where not measured.
    """
    pairs = [mass[np.triu_indices(len(mass), 1)] for mass in masses]
    values = np.stack([pair[np.isfinite(pair)] for pair in pairs])
    if values.shape[1] < 2:
        return np.full((len(masses), len(masses)), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.atleast_2d(np.corrcoef(values))
