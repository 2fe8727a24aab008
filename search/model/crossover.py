"""From which length on an artifact's patterns are faster than the best dense attention, measured on real prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels.index import TILE
from kernels.patterns import LayerPlan
from profiling.models.loading import LoadedModel
from search.model.timing import time_layers

_SHARES = (1 / 2, 1 / 4, 1 / 8)
_SHORTEST = 256
_LAYERS = 6
SPARSE = "sparse"


def dense_below(
    loaded: LoadedModel, ids: Sequence[int], plans: Mapping[int, LayerPlan], *, faster: bool, backend: str
) -> int:
    """The shortest of the prompt's length, a half, a quarter and an eighth of it from which on the patterns are faster.

    Args:
        loaded: the model.
        ids: of a real prompt; shorter ones are its first tokens.
        plans: of the searched layers, with the sizes for this length.
        faster: whether they are faster at the whole length; if not, it is one more than the length.
        backend: the attention backend.
    """
    if not faster:
        return len(ids) + 1
    below = len(ids)
    for share in _SHARES:
        tokens = round(len(ids) * share) // TILE * TILE
        if tokens < _SHORTEST:
            break
        timings = time_layers(
            loaded, ids[:tokens], {SPARSE: plans}, sorted(plans), layers=_LAYERS, sdpa=True, backend=backend
        )
        if timings.ratio(SPARSE) <= 1:
            break
        below = tokens
    return below
