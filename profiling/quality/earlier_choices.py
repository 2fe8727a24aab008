"""What heads lose when a head of an earlier layer chooses for them in prefill: could one estimate serve several?

Kascade (arXiv 2512.16391) gives layers the choices of the best-fitting heads of layers before them. Here each head
keeps kind and sizes of its pattern, and what it computes is chosen by another head's queries and keys.

Shapes: L layers, H query heads, S prompt length, C choosers of a head: itself, then all heads of all layers in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from artifacts import Artifact, HeadwiseError
from kernels.index import TILE, SparseIndex, empty_entries, lists
from kernels.joining import cat_heads
from kernels.patterns import KINDS, Pattern, largest
from profiling.inside.capture import LayerInputs, capture
from profiling.inside.chosen_tiles import row_mass
from profiling.inside.head_fidelity import attend, dense_attention, kept_mass
from profiling.inside.residual import ResidualStream
from profiling.prompts.prompt import Prompt
from profiling.quality.intervals import Interval, student
from runtime.plans import kernel_growth, kernel_patterns

if TYPE_CHECKING:
    from artifacts.sidecar import Array

# Kinds that choose by estimates from queries and keys.
ESTIMATING = ("vertical_slash", "block_sparse", "memory_units")
# Choices by the kind's own estimate, or of as many tiles by all scores, which an anchor that attends densely knows.
WAYS = ("estimate", "scores")
# Query tiles of a prompt that are measured, about so many, evenly spread before the dense tail.
_ROWS = 6
_FIGURES = ("change", "recall", "density")

# What all heads of a layer choose in a query tile, for a pattern or for a share of the causal tiles.
_Chooser = Callable[[Pattern | float, int], SparseIndex]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """(L, H, C) fp64 each, C = 1 + L * H, NaN for choosers that were not tried.

    change: squared change of what the head adds to the residual stream, relative to the stream's squared size, mean
    over tokens. recall: attention mass kept. density: share of the causal tiles computed.
    """

    change: np.ndarray
    recall: np.ndarray
    density: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """(L, H) the earlier head with the least change, as a place in C; 0 where none was tried.

        Of those that make the head compute at most a tenth more than it does by itself, if there are any: distances of
        diagonals that another head chose may lie scattered, and cross many more tiles.
        """
        change = np.nan_to_num(self.change, nan=np.inf)[..., 1:]
        dearer = ~(self.density[..., 1:] <= 1.1 * self.density[..., :1])
        first = np.lexsort((change, dearer), axis=-1)[..., 0] + 1
        return np.where(np.isfinite(change).any(-1), first, 0)


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Heads whose patterns estimate, by who chooses for them: the head itself, or the best-fitting earlier head.

    changes: what each of the two changes, summed over the heads; recall and density are means. ratio: of the changes,
    with its interval over prompts. near: heads that lose at most a tenth more by the other's choice.
    """

    way: str
    heads: int
    near: int
    changes: tuple[float, float]
    recall: tuple[float, float]
    density: tuple[float, float]
    ratio: Interval


def compared(model: Any, artifact: Artifact, arrays: Mapping[str, Array], prompts: Sequence[Prompt]) -> list[Earlier]:
    """For each way to choose: heads fitted on the first prompt and measured on the others.

    Raises:
        HeadwiseError: no head has both a pattern that estimates and a layer before its own.
    """
    found = []
    for way in WAYS:
        best = earlier_choices(model, artifact, arrays, prompts[0], way=way).best
        if not best.any():
            raise HeadwiseError("no head after the first layer has a pattern that estimates what to compute")
        some = [earlier_choices(model, artifact, arrays, each, way=way, only=best) for each in prompts[1:]]
        # (prompts, 2, heads): by itself, and by the other.
        figures = {name: np.stack([_both(getattr(one, name), best) for one in some]) for name in _FIGURES}
        own, other = figures["change"].mean(0)
        sums = figures["change"].sum(-1)
        logs = student(np.log(sums[:, 1] / sums[:, 0]).tolist())
        value, low, high = np.exp((logs.value, logs.low, logs.high)).tolist()
        ratio = Interval(value, low, high, logs.count)
        means = {name: tuple(figures[name].mean((0, 2)).tolist()) for name in ("recall", "density")}
        near = int((other <= 1.1 * own).sum())
        changes = (float(own.sum()), float(other.sum()))
        found.append(Earlier(way=way, heads=own.size, near=near, changes=changes, ratio=ratio, **means))
    return found


def _both(figure: np.ndarray, best: np.ndarray) -> np.ndarray:
    """(2, heads) of the heads that have an earlier one: by themselves, and by that one. figure: (L, H, C)."""
    served = best > 0
    return np.stack([figure[..., 0][served], np.take_along_axis(figure, best[..., None], axis=-1)[..., 0][served]])


def report(found: Sequence[Earlier]) -> list[str]:
    """Lines of text."""
    lines = [f"{'':40}{'change':>9}{'recall':>9}{'density':>9}"]
    for one in found:
        for i, who in enumerate(("itself", "best earlier head")):
            name = f"chosen by {who}, {one.way}"
            lines.append(f"{name:40}{one.changes[i]:9.5f}{one.recall[i]:9.4f}{one.density[i]:9.4f}")
        lines.append(
            f"  {one.ratio.value:.2f} times the change ({one.ratio.low:.2f} to {one.ratio.high:.2f}); "
            f"{one.near} of {one.heads} heads lose at most a tenth more"
        )
    return lines


def earlier_choices(
    model: Any,
    artifact: Artifact,
    arrays: Mapping[str, Array],
    prompt: Prompt,
    *,
    way: str = WAYS[0],
    only: np.ndarray | None = None,
) -> Choices:
    """Measure choosers on one dense pass, for the heads whose patterns estimate what to compute.

    Args:
        way: how a chooser knows: by the kind's estimate, or by its attention scores.
        only: (L, H) the chooser that each head tries beside itself, as `best` has them; None: all of earlier layers.
    """
    patterns, growth, length = kernel_patterns(artifact, arrays), kernel_growth(artifact), len(prompt.input_ids)
    if growth is not None:
        patterns = {name: growth.grown(pattern, length) for name, pattern in patterns.items()}
    layers, heads = artifact.model.num_layers, artifact.model.num_heads
    found = Choices(**{name: np.full((layers, heads, 1 + layers * heads), np.nan) for name in _FIGURES})
    rows = _rows(length, artifact.prefill.dense_tail)
    earlier: dict[int, _Chooser] = {}

    def visit(inputs: LayerInputs) -> Tensor | None:
        if inputs.sliding_window is not None:
            return None
        out, lse = dense_attention(inputs)
        estimates = _by_estimates(inputs, list(patterns.values()))
        own = estimates if way == WAYS[0] else _by_scores(inputs, rows)
        row = artifact.prefill.layers[inputs.layer]
        asked = [patterns[name] if patterns[name].kind in ESTIMATING else None for name in row or ()]
        if any(asked):
            layer = _Layer(inputs, out, lse, stream, asked, estimates, own, earlier, only)
            layer.measure(found, rows)
        earlier[inputs.layer] = own
        return out

    with ResidualStream(model) as stream:
        capture(model, torch.tensor([prompt.input_ids], device=model.device), visit)
    return found


def _rows(length: int, tail: int) -> range:
    """The query tiles that are measured: not the first, and none of the tail."""
    last = max(length - tail, 0) // TILE if tail else length // TILE
    step = max(1, last // _ROWS)
    return range(step // 2 + 1, last, step)


class _Layer:
    """One layer whose heads try choosers."""

    def __init__(
        self,
        inputs: LayerInputs,
        out: Tensor,
        lse: Tensor,
        stream: ResidualStream,
        asked: Sequence[Pattern | None],
        estimates: _Chooser,
        own: _Chooser,
        earlier: Mapping[int, _Chooser],
        only: np.ndarray | None,
    ) -> None:
        self._inputs, self._out, self._lse, self._stream = inputs, out, lse, stream
        self._asked, self._estimates, self._own, self._earlier = asked, estimates, own, earlier
        heads = len(asked)
        # Of each head the earlier ones that it tries, as places in C.
        self._places = [[1 + at * heads + head for at in earlier for head in range(heads)]] * heads
        if only is not None:
            self._places = [[int(place)] if place else [] for place in only[inputs.layer]]

    def measure(self, found: Choices, rows: range) -> None:
        """Add what the choosers come to in each head of the layer."""
        sums = [self._row(row) for row in rows]
        change, recall, tiles = (np.sum([each[i] for each in sums], axis=0) for i in range(len(_FIGURES)))
        tokens, causal = TILE * len(rows), sum(row + 1 for row in rows)
        for head, pattern in enumerate(self._asked):
            if pattern is not None:
                tried = [0, *self._places[head]]
                for name, values in zip(_FIGURES, (change / tokens, recall / tokens, tiles / causal), strict=True):
                    getattr(found, name)[self._inputs.layer, head, tried] = values[head, : len(tried)]

    def _row(self, row: int) -> list[np.ndarray]:
        """(H, 1 + the most places) of change, recall and tiles: sums over one query tile."""
        inputs, start, stop = self._inputs, row * TILE, (row + 1) * TILE
        heads, groups, width = inputs.q.shape[1], inputs.k.shape[1], 1 + max(map(len, self._places))
        parts = [part for head in range(heads) for part in self._parts(head, row, width)]
        order = range(heads * width)
        index = cat_heads(parts, torch.tensor(order, device=inputs.q.device), order)
        # The choosers of a head stand side by side.
        many = inputs.q[:, :, start:stop].unflatten(1, (groups, -1)).repeat_interleave(width, dim=2).flatten(1, 2)
        sinks = None if inputs.sinks is None else inputs.sinks.repeat_interleave(width)
        part = replace(inputs, q=many, k=inputs.k[:, :, :stop], v=inputs.v[:, :, :stop], sinks=sinks)
        out, lse = attend(part, index, "auto")
        change = out[0].float().unflatten(0, (heads, width)) - self._out[0, :, None, start:stop].float()
        moved = self._stream.by_head(inputs.layer, change, slice(start, stop))
        kept = kept_mass(lse[0].unflatten(0, (heads, width)), self._lse[0, :, None, start:stop], inputs.sinks)
        tiles = index.computed_tiles()[0].view(heads, width)
        return [figure.cpu().double().numpy() for figure in (moved, kept.sum(-1), tiles)]

    def _parts(self, head: int, row: int, width: int) -> list[SparseIndex]:
        """What the head computes by itself and by the others in turn, `width` choosers in all."""
        pattern, one = self._asked[head], slice(head, head + 1)
        if pattern is None:
            return [_of_tiles(self._inputs.q.new_zeros(width, 0, dtype=torch.int32), row)]
        asked: Pattern | float = pattern
        mine = self._estimates(pattern, row).of_heads(one)
        if self._own is not self._estimates:
            asked = float(mine.computed_tiles()) / (row + 1)
            mine = self._own(asked, row).of_heads(one)
        heads, places = len(self._asked), self._places[head]
        if len(places) == heads * len(self._earlier):
            return [mine, *(choose(asked, row) for choose in self._earlier.values())]
        chosen = [divmod(place - 1, heads) for place in places]
        parts = [self._earlier[at](asked, row).of_heads(slice(other, other + 1)) for at, other in chosen]
        return [mine, *parts] + [mine] * (width - 1 - len(places))


def _by_estimates(inputs: LayerInputs, patterns: Sequence[Pattern]) -> _Chooser:
    """What a layer's heads choose by their estimates. It holds those, no queries and keys."""
    heads = range(inputs.q.shape[1])
    builders = {}
    for key in {_key(pattern) for pattern in patterns if pattern.kind in ESTIMATING}:
        like = largest([pattern for pattern in patterns if _key(pattern) == key])
        builders[key] = KINDS[key[0]].prepare([like] * len(heads), heads, inputs.q, inputs.k, scale=inputs.scale)

    @lru_cache(maxsize=len(heads))
    def whole(pattern: Pattern) -> SparseIndex:
        return builders[_key(pattern)]([pattern] * len(heads))

    def choose(asked: Pattern | float, row: int) -> SparseIndex:
        assert isinstance(asked, Pattern)
        index = whole(asked)
        return _of_row(index.diagonals, index.listed(slice(row, row + 1)), index.columns, row)

    return choose


def _key(pattern: Pattern) -> tuple[str, int]:
    """Patterns with the same one share an estimate."""
    return pattern.kind, getattr(pattern, "last_q", 0)


def _by_scores(inputs: LayerInputs, rows: Sequence[int]) -> _Chooser:
    """What a layer's heads choose by their attention: the tiles with the most mass."""
    order = {}
    for row in rows:
        mass = row_mass(inputs.q, inputs.k, inputs.scale, row)
        # The own tile, which is computed in any case, and the first stand before all others.
        mass[:, row], mass[:, 0] = 3.0, 2.0
        order[row] = mass.argsort(dim=-1, descending=True)

    def choose(asked: Pattern | float, row: int) -> SparseIndex:
        assert isinstance(asked, float)
        count = max(2, round(asked * (row + 1)))
        return _of_tiles(order[row][:, 1:count].sort(-1).values.to(torch.int32), row)

    return choose


def _of_tiles(tiles: Tensor, row: int) -> SparseIndex:
    """The index of one query tile from its key tiles (heads, any width) beside its own."""
    own = torch.zeros(1, len(tiles), 1, dtype=torch.int32, device=tiles.device)
    return _of_row(own, tiles[None, :, None], empty_entries(1, len(tiles), 0, device=tiles.device), row)


def _of_row(diagonals: Tensor, tiles: Tensor, columns: Tensor, row: int) -> SparseIndex:
    """The index of one query tile from its entries, tiles as (1, heads, 1, any width)."""
    width = tuple(entries.shape[-1] for entries in (diagonals, tiles, columns))
    return SparseIndex.built(
        q_len=TILE,
        k_len=(row + 1) * TILE,
        diagonals=diagonals,
        **lists(tiles),
        columns=columns,
        widths=(width,) * diagonals.shape[1],
    )
