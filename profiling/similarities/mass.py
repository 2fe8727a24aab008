"""How much of a layer's attention lies on the tokens that another layer ranks first: OmniKV's layer similarity.

Shapes: L layers, N of them measured (in order), K keys, k chosen keys, T tasks, H query heads, G KV heads, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor


def kept(means: Tensor, chosen: Tensor) -> Tensor:
    """S[i, j] = attention of layer j on the keys that layer i chose, (N, N) fp64 (OmniKV, section 3.1).

    means: (N, K), each layer's attention averaged over its query heads; chosen: (N, k) key positions.
    """
    # Row by row: all at once would gather N x N x k.
    return torch.stack([means[:, keys].sum(1, dtype=torch.float64) for keys in chosen])


def head_sets(kv_heads: int, sets: str) -> tuple[tuple[int, ...], ...]:
    """The sets of a layer's KV heads that may choose together, all of them last.

    sets: "pooled", all of them alone; "head", each by itself, too; "group", also several together: any set of up to 4
    heads, of more those that lie beside each other by powers of two.
    """
    heads = range(kv_heads)
    found: list[tuple[int, ...]] = [(head,) for head in heads] if sets != "pooled" else []
    if sets == "group" and kv_heads <= 4:
        found += [some for size in range(2, kv_heads) for some in combinations(heads, size)]
    elif sets == "group":
        sizes = [2**power for power in range(1, kv_heads.bit_length()) if 2**power < kv_heads]
        found += [tuple(heads[at : at + size]) for size in sizes for at in range(0, kv_heads - size + 1, size)]
    return tuple(dict.fromkeys([*found, tuple(heads)]))


def attended(probabilities: Tensor, v: Tensor, lists: Tensor | None = None) -> Tensor:
    """A query's output from all keys, (G, 1, n, E), or from each of some lists of keys (U, k) alone: (G, U, n, E) fp32.

    probabilities: (G, n, K), of which a row sums to less than 1 beside attention sinks; v: (G, K, E).
    """
    if lists is None:
        return torch.bmm(probabilities, v.float())[:, None]
    at = lists.flatten()
    weights = probabilities[:, :, at].unflatten(-1, lists.shape)
    # What was left out gives its weight to the others and to sinks: what the row lacks, beyond rounding.
    sinks = 1 - probabilities.sum(-1)
    sinks = torch.where(sinks > 1e-4, sinks, 0)
    weights = weights / (sinks[..., None] + weights.sum(-1)).clamp_min(1e-30)[..., None]
    return torch.einsum("gnuk,guke->gune", weights, v[:, at].float().unflatten(1, lists.shape))


def covered(span: tuple[int, int], chosen: Tensor) -> Tensor:
    """Share of the positions of a half-open span that each layer's chosen keys (N, k) hold, (N) fp64."""
    return ((chosen >= span[0]) & (chosen < span[1])).sum(1, dtype=torch.float64) / (span[1] - span[0])


def ability(mass: np.ndarray, reach: int) -> np.ndarray:
    """Filtering ability (OmniKV, Figure 6a): what a layer's choice keeps on average over the `reach` layers after it.

    mass: (L, L), NaN where not measured. Returns (L), NaN where no layer was measured within reach.
    """
    found = np.full(len(mass), np.nan)
    for layer in range(len(mass)):
        after = mass[layer, layer + 1 : layer + 1 + reach]
        if np.isfinite(after).any():
            found[layer] = np.nanmean(after)
    return found


def agreement(masses: Sequence[np.ndarray]) -> np.ndarray:
    """Correlation of the similarity of each layer to each later one between tasks, (T, T); NaN where it is constant.

    masses: one (L, L) a task, NaN where not measured.
    """
    pairs = [mass[np.triu_indices(len(mass), 1)] for mass in masses]
    values = np.stack([pair[np.isfinite(pair)] for pair in pairs])
    if values.shape[1] < 2:
        return np.full((len(masses), len(masses)), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.atleast_2d(np.corrcoef(values))
